"""`probe`: carry out an order of `kubectl pykubeproxy trace --live` on this node, in a pod of ours."""

import click
import msgspec

from pykubeproxy.cli.help import command
from pykubeproxy.cli.terminal import click_errors
from pykubeproxy.kernel import KernelError
from pykubeproxy.nodes.sending import ProbeOrder, carry_out


@command(short_help="Send probes from this node or from a pod on it.")
@click.argument("order")
@click_errors(KernelError)
def probe(order: str) -> None:
    """Send the probes of an ORDER in JSON, and print how they end.

    `kubectl pykubeproxy trace --live` runs this.
    """
    try:
        wanted = msgspec.json.decode(order, type=ProbeOrder)
    except ValueError as error:
        raise click.UsageError(f"ORDER is invalid: {error}") from None
    click.echo(msgspec.json.encode(carry_out(wanted)))
