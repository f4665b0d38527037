"""`pykubeproxy dump-rules`: the live tables of this node as people think of them."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

import click
import msgspec
import yaml

from pykubeproxy import kernel
from pykubeproxy.cli import terminal
from pykubeproxy.cli.completing import namespaces, services
from pykubeproxy.cli.live import backend_to_read
from pykubeproxy.cli.output import echo_styled
from pykubeproxy.inspect import forms
from pykubeproxy.inspect.dump import ServiceView, views
from pykubeproxy.inspect.listing import AROUND, listing
from pykubeproxy.inspect.wanted import Wanted, parse_wanted
from pykubeproxy.kernel import Backend, Iptables, KernelError
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ruleset import Counters, Ruleset

_FAMILIES = {family.value.lower(): family for family in Family}
_Live = Sequence[tuple[Ruleset, Counters]]
# Where rules for frontends are to be found.
ROOTS = (
    skeleton.NAT_SERVICES,
    skeleton.NAT_NODEPORTS,
    skeleton.FILTER_SERVICES,
    skeleton.FILTER_EXTERNAL,
)
# Between two looks of --watch, in seconds.
_INTERVAL = 2.0


@click.command("dump-rules", short_help="Show what the live rules do: services, endpoints, shares.")
@click.argument("service", default="", shell_complete=services)
@click.option(
    "-n", "--namespace", default="", shell_complete=namespaces, help="Only services of this namespace."
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "wide", "json", "yaml", "iptables"]),
    default="table",
    show_default=True,
    help="wide: with bytes and chains; iptables: the rules themselves, in the order a packet meets them.",
)
@click.option("--family", type=click.Choice(list(_FAMILIES)), help="Only this family; else both.")
@click.option(
    "--iptables-backend",
    type=click.Choice(["auto", "nft", "legacy"]),
    default="auto",
    show_default=True,
    help="Where to look; auto: where this node's rules are.",
)
@click.option("--watch", is_flag=True, help="Show the new connections a second, until Ctrl-C.")
def dump_rules(
    service: str,
    namespace: str,
    output: str,
    family: str | None,
    iptables_backend: Literal["auto", "nft", "legacy"],
    watch: bool,
) -> None:
    """Show what this node's iptables rules do with SERVICE, or with all services.

    SERVICE is a name, namespace/name, or either with :port, a port's name or number. For each port the addresses
    that lead to it, and the endpoints with the share of new connections that each gets. Reads the rules of
    kube-proxy as well as our own, whether an agent runs or not, and changes nothing.

    \b
    pykubeproxy dump-rules
    pykubeproxy dump-rules default/web:http -o iptables
    pykubeproxy dump-rules default/web --watch
    """
    if watch and output != "table":
        raise click.UsageError("--watch goes with -o table only")
    try:
        wanted = parse_wanted(service, namespace)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    families = tuple(_FAMILIES.values()) if family is None else (_FAMILIES[family],)
    try:
        backend = backend_to_read(iptables_backend)

        def look() -> tuple[_Live, Sequence[ServiceView]]:
            live = _read(backend, families, wanted, required=family is not None)
            return live, forms.in_order(view for tables in live for view in views(*tables, wanted))

        live, found = look()
        if not found:
            _nothing(wanted, backend, service)
        if watch:
            _watch(found, lambda: look()[1])
        else:
            echo_styled(_text(output, found, live, wanted))
    except KernelError as error:
        raise click.ClickException(str(error)) from None


def _watch(found: Sequence[ServiceView], look: Callable[[], Sequence[ServiceView]]) -> None:
    """Show again and again what has come since the last look, on a terminal in place of what stood there."""
    begun = time.monotonic()
    try:
        while True:
            time.sleep(_INTERVAL)
            before, seen, found, begun = found, begun, look(), time.monotonic()
            text = forms.table(found, forms.rates(before, begun - seen))
            terminal.clear()
            echo_styled(f"New connections a second, at {time.strftime('%H:%M:%S')}\n\n{text}\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return


def _read(backend: Backend, families: Sequence[Family], wanted: Wanted, required: bool) -> _Live:
    """The part of the live tables that is wanted; a family that this node lacks is left out, unless it is required."""
    live = []
    for family in families:
        try:
            live.append(_tables(kernel.open_iptables(backend, family), wanted))
        except KernelError as error:
            if required or isinstance(error, kernel.NotPermitted) or not _dispensable(backend, family, error):
                raise
    return live


def _tables(iptables: Iptables, wanted: Wanted) -> tuple[Ruleset, Counters]:
    """What there is of one family; for one service, if its name stands in rules, only what is about it."""
    part = None
    if wanted.name:
        word = f"{wanted.namespace}/{wanted.name}"
        part = kernel.part_about(iptables, word, ROOTS, AROUND)
    return part or iptables.save_counted()


def _dispensable(backend: Backend, family: Family, error: KernelError) -> bool:
    return isinstance(error, kernel.Missing) or bool(kernel.unavailable(backend, family))


def _nothing(wanted: Wanted, backend: Backend, service: str) -> None:
    """Say on standard error that there is nothing to show. Raises ClickException if a service was asked for."""
    where = f"in the {backend.value} tables of this node"
    if service:
        raise click.ClickException(f"there are no rules for {wanted} {where}")
    of = f" of namespace {wanted.namespace}" if wanted.namespace else ""
    click.echo(f"There are no rules for services{of} {where}.", err=True)


def _text(output: str, found: Sequence[ServiceView], live: _Live, wanted: Wanted) -> str:
    match output:
        case "json":
            return msgspec.json.format(msgspec.json.encode(forms.document(found))).decode() + "\n"
        case "yaml":
            return yaml.safe_dump(forms.document(found), sort_keys=False, allow_unicode=True)
        case "iptables":
            texts = ((ruleset.family, listing(ruleset, wanted)) for ruleset, _ in live)
            return "\n".join(f"# {family.value}\n{text}" for family, text in texts if text)
        case "wide":
            return forms.table(found, forms.in_full, with_chains=True)
        case _:
            return forms.table(found)
