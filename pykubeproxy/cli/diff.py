"""`pykubeproxy diff`: what differs between the rules there are and the rules there ought to be."""

from collections.abc import Mapping
from typing import NamedTuple

import click
import msgspec

from pykubeproxy import kernel
from pykubeproxy.agent.startup import Opened
from pykubeproxy.agent.sync.tables import FamilyTables
from pykubeproxy.cli.flags import CONTEXT_SETTINGS, config_options, load_config
from pykubeproxy.cli.live import backend_to_read
from pykubeproxy.cli.manifests import read_objects
from pykubeproxy.cli.output import echo_json, echo_styled
from pykubeproxy.cli.present import all_objects, filename_option, host_name
from pykubeproxy.config import Config
from pykubeproxy.inspect import changes_forms
from pykubeproxy.inspect.changes import Changes, changes
from pykubeproxy.inspect.desired import as_installed
from pykubeproxy.kernel import TABLES, Iptables, KernelError
from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.context import KernelFacts, terms
from pykubeproxy.rules.difference import own_part
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster

_FAMILIES = {family.value.lower(): family for family in Family}
_DIFFERENT = 1  # the exit code, as diff has it


class _Trouble(click.ClickException):
    """Nothing could be compared."""

    exit_code = 2


class _Side(NamedTuple):
    """Rules that ought to be: for which objects, on which node, under which configuration, and what to call them."""

    title: str
    cluster: Cluster
    node: Node
    config: Config

    def ruleset(self, family: Family, facts: KernelFacts | None) -> Ruleset:
        """The rules of a family; without facts about a kernel, it is one that can do everything."""
        on = terms(
            self.config,
            self.node.name,
            self.node,
            facts or KernelFacts(addresses=self.node.addresses),
            family,
        )
        return as_installed(render(self.cluster, on), on.options)


@click.command(
    context_settings=CONTEXT_SETTINGS, short_help="Show what differs between live and wanted rules."
)
@filename_option
@click.option(
    "--against", metavar="PATH", help="Compare with the rules for the objects in PATH, not the live ones."
)
@click.option(
    "--against-config",
    metavar="FILE",
    help="Compare with the rules under this configuration, not the live ones.",
)
@click.option("--family", type=click.Choice(list(_FAMILIES)), help="Only this family; else both.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["words", "rules", "json"]),
    default="words",
    show_default=True,
    help="rules: a unified diff, chain by chain.",
)
@config_options
def diff(
    filename: str | None,
    against: str | None,
    against_config: str | None,
    family: str | None,
    output: str,
    flags: dict[str, object],
) -> None:
    """Show what would change if this node's rules became those they ought to be.

    What they ought to be, the objects of the API server say, or with -f those in PATH. They are held against the live
    rules; or, with --against and --against-config, against the rules for other objects or another configuration, which
    needs no root. Only the proxy's own chains and jumps are compared, and nothing is changed. The exit code is 0
    without a difference, 1 with one, and 2 in case of trouble. The flags are those of `run`.

    \b
    sudo pykubeproxy diff --config /var/lib/kube-proxy/config.conf
    sudo pykubeproxy diff -f objects.yaml --hostname-override node1 -o rules
    pykubeproxy diff -f new.yaml --against old.yaml --hostname-override node1
    """
    if filename == against == "-":
        raise _Trouble('only one of -f and --against can be "-", standard input')
    try:
        families = tuple(_FAMILIES.values()) if family is None else (_FAMILIES[family],)
        config, warnings = load_config(flags)
        if against is None and against_config is None:
            side = _side(filename, _named(config), "")
            before, found = _with_live(side, families, required=family is not None)
        else:
            side = _side(filename, config, str(flags.get("config", "")) if against_config else "")
            other, more = _other(side, against, against_config, flags)
            warnings += more
            before = other.title
            found = [changes(other.ruleset(it, None), side.ruleset(it, None)) for it in families]
    except click.ClickException as error:
        raise _Trouble(error.format_message()) from None
    except KernelError as error:
        raise _Trouble(str(error)) from None
    for warning in warnings:
        click.echo(warning, err=True)
    _show(found, before, side.title, output)
    raise SystemExit(_DIFFERENT if any(it.chains for it in found) else 0)


def _named(config: Config) -> Config:
    """The configuration of this very machine, which is the node unless another name is given."""
    return msgspec.structs.replace(config, hostname_override=config.hostname_override or host_name())


def _side(filename: str | None, config: Config, config_file: str) -> _Side:
    if filename is None:
        title, (cluster, node) = "API server", all_objects(config)
    else:
        title, (cluster, node) = filename, read_objects(filename, config)
    return _Side(_title(title, config_file), cluster, node, config)


def _other(
    side: _Side, against: str | None, against_config: str | None, flags: Mapping[str, object]
) -> tuple[_Side, tuple[str, ...]]:
    """What is compared with: other objects, or the same, under another configuration, or the same; and warnings."""
    loaded = load_config({**flags, "config": against_config}) if against_config is not None else None
    config, warnings = loaded or (side.config, ())
    if against is not None:
        return _side(against, config, against_config or ""), warnings
    title = _title("the same objects", against_config or "")
    return _Side(title, side.cluster, side.node, config), warnings


def _title(objects: str, config_file: str) -> str:
    return f"{objects} with {config_file}" if config_file else objects


def _with_live(side: _Side, families: tuple[Family, ...], required: bool) -> tuple[str, list[Changes]]:
    """The live rules' title, and what differs. Families that this kernel lacks are left out, unless required."""
    backend = backend_to_read(side.config.iptables_backend.value)
    found = []
    for family in families:
        if reason := kernel.unavailable(backend, family):
            if required:
                raise click.ClickException(reason)
            continue
        found.append(_drift(side, kernel.open_iptables(backend, family)))
    return f"live rules ({backend.value})", found


def _drift(side: _Side, iptables: Iptables) -> Changes:
    wanted = side.ruleset(iptables.family, _facts(side.config, iptables))
    return changes(own_part(iptables.save(TABLES), wanted), wanted)


def _facts(config: Config, iptables: Iptables) -> KernelFacts:
    """What the agent would find out about this kernel before it writes rules. Makes no nfacct counters, as it would."""
    features = kernel.probe(iptables)
    opened = Opened(FamilyTables(iptables, None), features, features.nfacct)
    return opened.facts(with_addresses=bool(config.node_port_addresses))


def _show(found: list[Changes], before: str, after: str, output: str) -> None:
    match output:
        case "json":
            document = changes_forms.document(found, before, after)
            echo_json(document)
        case "rules":
            echo_styled(changes_forms.unified(found, before, after))
        case _:
            echo_styled(changes_forms.in_words(found, before, after))
            if not any(it.chains for it in found):
                click.echo(f"There is no difference: {before}, {after}.", err=True)
