"""`pykubeproxy dump-rules`: show the services, endpoints and shares in the live tables of this node."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

import click

from pykubeproxy.cli import terminal
from pykubeproxy.cli.bundle_files import bundle_option, opened
from pykubeproxy.cli.completion import namespaces, services
from pykubeproxy.cli.flags import backend_option, family_option, rules_option, tables_output_option
from pykubeproxy.cli.help import OUTPUT, QUESTION, SOURCE, command, option
from pykubeproxy.cli.inputs import service_filter
from pykubeproxy.cli.node_rules import node_rules, rules_errors
from pykubeproxy.cli.terminal import echo_json, echo_line, echo_styled
from pykubeproxy.inspect.dump import render
from pykubeproxy.inspect.dump.model import ServiceView, in_order, views
from pykubeproxy.inspect.dump.render_rules import listing
from pykubeproxy.inspect.filter import ServiceFilter
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import Counters, Ruleset

_Tables = Sequence[tuple[Ruleset, Counters]]
# Seconds between updates of --watch.
_INTERVAL = 2.0


@command("dump-rules", short_help="Show services, endpoints and shares in the live rules.")
@click.argument("service", default="", shell_complete=services)
@option(
    "-n",
    "--namespace",
    default="",
    shell_complete=namespaces,
    help="Show services of this namespace only.",
    group=QUESTION,
)
@tables_output_option
@family_option
@rules_option
@bundle_option
@backend_option(help="The backend to read; auto detects the one in use.", group=SOURCE)
@option("--watch", is_flag=True, help="Show new connections per second until Ctrl-C.", group=OUTPUT)
@rules_errors()
def dump_rules(
    service: str,
    namespace: str,
    output: str,
    families: tuple[Family, ...],
    files: tuple[str, ...],
    bundle_file: str | None,
    backend: Literal["auto", "nft", "legacy"],
    watch: bool,
) -> None:
    """Show the frontends and endpoints of SERVICE, or of all services, in the live rules of this node.

    SERVICE has the form [NAMESPACE/]NAME[:PORT], with the name or number of a port, also as svc/[NAMESPACE/]NAME or
    NAME.NAMESPACE. For each endpoint, show its share of new connections. This also reads the rules of kube-proxy, needs no
    running agent and changes nothing. With --rules or --bundle, show the rules of another node; this needs neither root
    nor iptables.

    \b
    pykubeproxy dump-rules
    pykubeproxy dump-rules default/web:http -o iptables
    pykubeproxy dump-rules default/web --watch
    ssh node1 sudo iptables-save -c | pykubeproxy dump-rules --rules -
    """
    if watch and output != "table":
        raise click.UsageError("--watch requires -o table")
    if watch and (files or bundle_file):
        raise click.UsageError("--watch requires live rules; remove --rules or --bundle")
    query = service_filter(service, namespace)
    rules = node_rules(files, opened(bundle_file), backend)

    def read() -> tuple[_Tables, Sequence[ServiceView]]:
        tables = rules.counted(families, query)
        return tables, in_order(view for one in tables for view in views(*one, query))

    tables, found = read()
    if not found:
        _report_none(query, rules.place, service)
    match output:
        case "table" if watch:
            _watch(found, lambda: read()[1])
        case "json":
            echo_json(render.document(found))
        case "yaml":
            import yaml

            click.echo(yaml.safe_dump(render.document(found), sort_keys=False), nl=False)
        case "iptables":
            texts = ((ruleset.family, listing(ruleset, query)) for ruleset, _ in tables)
            click.echo("\n".join(f"# {family.value}\n{text}" for family, text in texts if text), nl=False)
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
            echo_line(f"New connections per second at {time.strftime('%H:%M:%S')}")
            click.echo()
            echo_styled(text)
            click.echo()
            sys.stdout.flush()
    except KeyboardInterrupt:
        return


def _report_none(query: ServiceFilter, place: str, service: str) -> None:
    """Print to standard error that there are no services. Raises ClickException if the query names one."""
    if service:
        raise click.ClickException(
            f"there are no rules for {query} {place}; run dump-rules without SERVICE to list the services that have"
        )
    scope = f" of namespace {query.namespace}" if query.namespace else ""
    echo_line(f"There are no rules for services{scope} {place}.", err=True)
