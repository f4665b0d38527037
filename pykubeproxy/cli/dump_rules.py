"""`pykubeproxy dump-rules`: show the services, endpoints and shares in the live tables of this node."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

import click
import yaml

from pykubeproxy import kernel
from pykubeproxy.cli import terminal
from pykubeproxy.cli.completion import namespaces, services
from pykubeproxy.cli.flags import backend_option, choice_option, family_option
from pykubeproxy.cli.inputs import backend_to_read, service_filter
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_styled
from pykubeproxy.inspect.dump import render
from pykubeproxy.inspect.dump.model import ServiceView, in_order, views
from pykubeproxy.inspect.dump.render_rules import OTHER_CHAINS, listing
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.kernel import Backend, Iptables, KernelError
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.ruleset import Counters, Ruleset

_Live = Sequence[tuple[Ruleset, Counters]]
# The chains with rules for frontends.
ROOTS = (
    skeleton.NAT_SERVICES,
    skeleton.NAT_NODEPORTS,
    skeleton.FILTER_SERVICES,
    skeleton.FILTER_EXTERNAL,
)
# Seconds between updates of --watch.
_INTERVAL = 2.0


@click.command("dump-rules", short_help="Show services, endpoints and shares in the live rules.")
@click.argument("service", default="", shell_complete=services)
@click.option(
    "-n", "--namespace", default="", shell_complete=namespaces, help="Show services of this namespace only."
)
@choice_option(
    "-o",
    "--output",
    choices=("table", "wide", "json", "yaml", "iptables"),
    help="Output format; wide adds bytes and chains, iptables prints the rules in the order packets pass them.",
)
@family_option
@backend_option(help="The backend to read; auto detects the one in use.")
@click.option("--watch", is_flag=True, help="Show new connections per second until Ctrl-C.")
@click_errors(KernelError)
def dump_rules(
    service: str,
    namespace: str,
    output: str,
    families: tuple[Family, ...],
    backend: Literal["auto", "nft", "legacy"],
    watch: bool,
) -> None:
    """Show the frontends and endpoints of SERVICE, or of all services, in the live rules of this node.

    SERVICE has the form [NAMESPACE/]NAME[:PORT], with the name or number of a port. For each endpoint, show its share
    of new connections. This also reads the rules of kube-proxy, needs no running agent and changes nothing.

    \b
    pykubeproxy dump-rules
    pykubeproxy dump-rules default/web:http -o iptables
    pykubeproxy dump-rules default/web --watch
    """
    if watch and output != "table":
        raise click.UsageError("--watch requires -o table")
    query = service_filter(service, namespace)
    used = backend_to_read(backend)

    def read() -> tuple[_Live, Sequence[ServiceView]]:
        live = _read(used, families, query)
        return live, in_order(view for tables in live for view in views(*tables, query))

    live, found = read()
    if not found:
        _report_none(query, used, service)
    match output:
        case "table" if watch:
            _watch(found, lambda: read()[1])
        case "json":
            echo_json(render.document(found))
        case "yaml":
            echo_styled(yaml.safe_dump(render.document(found), sort_keys=False, allow_unicode=True))
        case "iptables":
            texts = ((ruleset.family, listing(ruleset, query)) for ruleset, _ in live)
            echo_styled("\n".join(f"# {family.value}\n{text}" for family, text in texts if text))
        case "wide":
            echo_styled(render.table(found, render.counters, with_chains=True))
        case _:
            echo_styled(render.table(found))


def _watch(views: Sequence[ServiceView], read: Callable[[], Sequence[ServiceView]]) -> None:
    """Print new connections per second in a loop; on a terminal, overwrite the previous table."""
    now = time.monotonic()
    try:
        while True:
            time.sleep(_INTERVAL)
            before, earlier, views, now = views, now, read(), time.monotonic()
            text = render.table(views, render.rates(before, now - earlier))
            terminal.clear()
            echo_styled(f"New connections per second at {time.strftime('%H:%M:%S')}\n\n{text}\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return


def _read(backend: Backend, families: Sequence[Family], query: ServiceFilter) -> _Live:
    """Read the live tables as far as the query needs them. Of both families, skip one that this node lacks."""
    live = []
    for family in families:
        try:
            live.append(_tables(kernel.open_iptables(backend, family), query))
        except KernelError as error:
            if len(families) == 1 or isinstance(error, kernel.NotPermitted):
                raise
            if not isinstance(error, kernel.Missing) and kernel.has_nat(backend, family):
                raise
    return live


def _tables(iptables: Iptables, query: ServiceFilter) -> tuple[Ruleset, Counters]:
    """Read one family; for a query by name, only the chains about that service if comments name it."""
    part = None
    if query.name:
        word = f"{query.namespace}/{query.name}"
        part = kernel.live_ruleset_about(iptables, word, ROOTS, OTHER_CHAINS)
    return part or iptables.save_counted()


def _report_none(query: ServiceFilter, backend: Backend, service: str) -> None:
    """Print to standard error that there are no services. Raises ClickException if the query names one."""
    where = f"in the {backend.value} tables of this node"
    if service:
        raise click.ClickException(f"there are no rules for {query} {where}")
    scope = f" of namespace {query.namespace}" if query.namespace else ""
    click.echo(f"There are no rules for services{scope} {where}.", err=True)
