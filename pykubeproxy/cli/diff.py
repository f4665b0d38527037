"""`pykubeproxy diff`: compare live rules, or those of other objects or settings, with the desired rules."""

from collections.abc import Mapping
from typing import NamedTuple

import click
import msgspec

from pykubeproxy import kernel
from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    choice_option,
    config_options,
    family_option,
    filename_option,
    read_config,
)
from pykubeproxy.cli.inputs import (
    Source,
    agents_objects,
    all_objects,
    backend_to_read,
    host_name,
    read_objects,
)
from pykubeproxy.cli.running_agent import AgentState, ask_agent, url_option
from pykubeproxy.cli.terminal import echo_json, echo_styled
from pykubeproxy.config import Config
from pykubeproxy.inspect.diff import render as views
from pykubeproxy.inspect.diff.model import Changes, compare
from pykubeproxy.kernel import TABLES, Iptables, KernelError
from pykubeproxy.objects import Family
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.difference import installed, own_part
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.wording import listed

_DIFFERENT = 1  # the exit code of diff


class _Trouble(click.ClickException):
    """The comparison failed; the exit code is that of diff."""

    exit_code = 2


class _Side(NamedTuple):
    """One side of the comparison: where objects come from, and the configuration that rules follow from."""

    title: str
    source: Source
    config: Config

    def ruleset(self, family: Family, facts: KernelFacts | None = None) -> Ruleset:
        """Return the rules of a family; without `facts`, for a kernel with all features."""
        cluster, node, api_servers = self.source
        facts = facts or KernelFacts(addresses=node.addresses)
        context = rule_context(self.config, node.name, node, facts, family, api_servers)
        return installed(render(cluster, context), context.options)


@click.command(context_settings=CONTEXT_SETTINGS, short_help="Compare live rules with desired rules.")
@filename_option
@click.option(
    "--against",
    metavar="PATH",
    help="Compare with the rules for the objects in PATH instead of the live rules.",
)
@click.option(
    "--against-config",
    metavar="FILE",
    help="Compare with the rules for this configuration instead of the live rules.",
)
@family_option
@choice_option(
    "-o",
    "--output",
    choices=("words", "rules", "json"),
    help="Output format; rules is a unified diff of each chain.",
)
@url_option(unless="-f and flags of `run`")
@config_options
def diff(
    filename: str | None,
    against: str | None,
    against_config: str | None,
    families: tuple[Family, ...],
    url: str | None,
    output: str,
    flags: dict[str, object],
) -> None:
    """Show how the live rules of this node differ from the desired rules.

    By default, the desired rules follow from objects and configuration of the agent on this node. With -f, objects come
    from files. With flags of `run`, or if no agent answers, they come from the API server. The output says which.

    With --against or --against-config, compare the desired rules with the rules for other objects or another
    configuration instead of the live rules; this needs no root. Only the proxy's own chains and jumps are compared, and
    nothing changes. In chains that services share, an order of rules that means nothing to a packet is no difference:
    kube-proxy's order varies. The exit code is 0 without differences, 1 with differences and 2 on errors.

    \b
    sudo pykubeproxy diff
    sudo pykubeproxy diff --config /var/lib/kube-proxy/config.conf
    sudo pykubeproxy diff -f objects.yaml --hostname-override node1 -o rules
    pykubeproxy diff -f new.yaml --against old.yaml --hostname-override node1
    """
    if filename == against == "-":
        raise _Trouble('only one of -f and --against can be "-" (standard input)')
    live = against is None and against_config is None
    try:
        config = read_config(flags)
        agent = ask_agent(url, flags, filename, slices="all")
        same_settings = against is not None and against_config is None
        settings = "" if same_settings else str(flags.get("config", "" if flags else "default settings"))
        side = _agents_side(agent) if agent else _side(filename, config, settings, live)
        if live:
            before, found = _with_live(side, families)
        else:
            other = _other(side, against, against_config, flags)
            before = other.title
            found = [compare(other.ruleset(it), side.ruleset(it)) for it in families]
    except click.ClickException as error:
        raise _Trouble(error.format_message()) from None
    except KernelError as error:
        raise _Trouble(str(error)) from None
    _show(found, before, side.title, output)
    raise SystemExit(_DIFFERENT if any(it.chains for it in found) else 0)


def _agents_side(agent: AgentState) -> _Side:
    if quarantined := sorted({str(it.port_name) for it in agent.objects.quarantined}):
        click.echo(f"The agent has quarantined {listed(quarantined, 5)}; their rules differ.", err=True)
    title = "objects and configuration of the agent"
    config = msgspec.structs.replace(agent.config, hostname_override=agent.objects.node.name)
    return _Side(title, agents_objects(agent.objects), config)


def _side(filename: str | None, config: Config, settings: str, live: bool) -> _Side:
    """Return the side of the desired rules; that to compare with live rules is for this node."""
    if live:
        name = config.hostname_override or host_name()
        config = msgspec.structs.replace(config, hostname_override=name)
    if filename is None:
        return _Side(_title("API server", settings), all_objects(config), config)
    return _Side(_title(filename, settings), Source(*read_objects(filename, config)), config)


def _other(
    side: _Side, against: str | None, against_config: str | None, flags: Mapping[str, object]
) -> _Side:
    """Return the side to compare with: the objects or the configuration differ, or both."""
    config = side.config
    if against_config is not None:
        other = read_config({**flags, "config": against_config}, "--against-config")
        name = other.hostname_override or config.hostname_override
        config = msgspec.structs.replace(other, hostname_override=name)
    if against is not None:
        return _Side(_title(against, against_config or ""), Source(*read_objects(against, config)), config)
    return _Side(_title("the same objects", against_config or ""), side.source, config)


def _title(objects: str, settings: str) -> str:
    return f"{objects} with {settings}" if settings else objects


def _with_live(side: _Side, families: tuple[Family, ...]) -> tuple[str, list[Changes]]:
    """Return the title of the live rules and the changes. Of both families, skip one that this kernel lacks."""
    backend = backend_to_read(side.config.iptables_backend.value)
    found = []
    for family in families:
        reason = kernel.unsupported_reason(backend, family)
        if reason and len(families) == 1:
            raise click.ClickException(reason)
        if not reason:
            found.append(_compare_live(side, kernel.open_iptables(backend, family)))
    return f"live rules ({backend.value})", found


def _compare_live(side: _Side, iptables: Iptables) -> Changes:
    # Importing the agent takes half a second.
    from pykubeproxy.agent.startup import kernel_facts

    features = kernel.probe_features(iptables)
    # The agent would create nfacct counters; assume that it can.
    facts = kernel_facts(iptables.family, features, bool(side.config.node_port_addresses))
    desired = side.ruleset(iptables.family, facts)
    return compare(own_part(iptables.save(TABLES), desired), desired)


def _show(found: list[Changes], before: str, after: str, output: str) -> None:
    match output:
        case "json":
            echo_json(views.document(found, before, after))
        case "rules":
            echo_styled(views.unified(found, before, after))
        case _:
            echo_styled(views.text(found, before, after))
            if not any(it.chains for it in found):
                click.echo(f"No differences: {before}, {after}.", err=True)
