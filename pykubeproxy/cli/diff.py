"""`pykubeproxy diff`: compare live rules, or those of other objects or settings, with the desired rules."""

from collections.abc import Mapping
from typing import NamedTuple

import click
import msgspec

from pykubeproxy.bundle.read import Bundle
from pykubeproxy.cli.bundle_agent import NoObjects, bundled_agent
from pykubeproxy.cli.bundle_files import bundle_option, opened
from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    choice_option,
    config_options,
    family_option,
    filename_option,
    node_address_option,
    read_config,
)
from pykubeproxy.cli.help import DIFFERENT, OUTPUT, QUESTION, command, option
from pykubeproxy.cli.inputs import (
    Source,
    agent_objects,
    all_objects,
    host_name,
    read_objects,
)
from pykubeproxy.cli.node_rules import NodeRules, node_rules, rules_errors
from pykubeproxy.cli.rules_files import rules_option
from pykubeproxy.cli.running_agent import AgentState, ask_agent, url_option
from pykubeproxy.cli.terminal import echo_json, echo_styled
from pykubeproxy.config import Config
from pykubeproxy.inspect.diff import render as views
from pykubeproxy.inspect.diff.model import compare
from pykubeproxy.inspect.meaning import render as meaning_views
from pykubeproxy.inspect.meaning.model import compare_meaning, proxy_part
from pykubeproxy.inspect.trace.packet import Host
from pykubeproxy.objects import Family
from pykubeproxy.rules.context import KernelFacts, rule_context
from pykubeproxy.rules.difference import installed, own_part
from pykubeproxy.rules.render import render
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.wording import listed

_NO_SETTINGS = (
    "Note: the bundle does not have the configuration of the proxy. Give it with --config or with other flags of"
    " `run`, such as --cluster-cidr."
)


class _Side(NamedTuple):
    """One side of the comparison: where objects come from, and the configuration that rules follow from."""

    title: str
    source: Source
    config: Config

    def addresses(self, facts: KernelFacts) -> tuple[str, ...]:
        """Return the node's addresses: those of the facts, or else those of the Node."""
        return facts.addresses or self.source.node.addresses

    def ruleset(self, family: Family, facts: KernelFacts) -> Ruleset:
        """Return the rules of a family; if the facts have no addresses, with those of the Node."""
        cluster, node, api_servers = self.source
        facts = msgspec.structs.replace(facts, addresses=self.addresses(facts))
        context = rule_context(self.config, node.name, node, facts, family, api_servers)
        return installed(render(cluster, context), context.options)


class _Pair(NamedTuple):
    """Two states of one family's tables, and the addresses of the node."""

    before: Ruleset
    after: Ruleset
    addresses: tuple[str, ...]


@command(
    context_settings=CONTEXT_SETTINGS,
    exit_codes={0: "No differences.", 1: "Differences.", 2: "Not compared: wrong usage or a failure."},
    short_help="Compare live rules with desired rules.",
)
@filename_option
@option(
    "--against",
    metavar="PATH",
    help="Compare with the rules for the objects in PATH instead of the live rules.",
    group=QUESTION,
)
@option(
    "--against-config",
    metavar="FILE",
    help="Compare with the rules for this configuration instead of the live rules.",
    group=QUESTION,
)
@rules_option
@bundle_option
@node_address_option
@family_option
@choice_option(
    "-o",
    "--output",
    choices=("words", "rules", "json"),
    help="Output format; rules is a unified diff of each chain.",
    group=OUTPUT,
)
@option(
    "--meaning",
    is_flag=True,
    help="Compare what packets get, whatever the form of the rules: for proxies of other versions.",
    group=QUESTION,
)
@url_option(unless="-f and flags of `run`")
@config_options
@rules_errors()
def diff(
    filename: str | None,
    against: str | None,
    against_config: str | None,
    files: tuple[str, ...],
    bundle_file: str | None,
    addresses: tuple[str, ...],
    families: tuple[Family, ...],
    url: str | None,
    output: str,
    meaning: bool,
    flags: dict[str, object],
) -> None:
    """Show how the live rules of this node differ from the desired rules.

    By default, the desired rules follow from objects and configuration of the agent on this node. With -f, objects come
    from files. With flags of `run`, or if no agent answers, they come from the API server. The output says which.

    With --rules, compare the rules of another node, from files; --hostname-override names the node. Without -f, objects
    come from the API server, or from the agent at --url, and flags of `run` say how its proxy is configured.

    With --bundle, compare the rules of another node with the objects and the configuration in the same file. With -f,
    objects come from files, with --kubeconfig from the API server; other flags of `run` replace the configuration.

    With --against or --against-config, compare the desired rules with the rules for other objects or another
    configuration instead of the live rules; this needs no root. Only the proxy's own chains and jumps are compared, and
    nothing changes. In chains that services share, an order of rules that means nothing to a packet is no difference:
    kube-proxy's order varies.

    With --meaning, compare what the first packet of a connection gets, for every client and every address and port of a
    service: endpoints with their shares, masqueraded or not, dropped, rejected, and session affinity. Rules of another
    form, such as those of another version of kube-proxy, are no difference if they mean the same.

    \b
    sudo pykubeproxy diff
    sudo pykubeproxy diff --config /var/lib/kube-proxy/config.conf
    sudo pykubeproxy diff -f objects.yaml --hostname-override node1 -o rules
    pykubeproxy diff --bundle node1.tar.gz
    pykubeproxy diff --rules node1.txt -f objects.yaml --hostname-override node1
    pykubeproxy diff -f new.yaml --against old.yaml --hostname-override node1
    """
    if meaning and output == "rules":
        raise click.UsageError("--meaning compares no text of rules; remove it, or -o rules")
    if [filename, against, bundle_file, *files].count("-") > 1:
        raise click.UsageError('only one of -f, --against, --rules and --bundle can be "-" (standard input)')
    of_node = against is None and against_config is None
    if (files or bundle_file) and not of_node:
        name = "--rules" if files else "--bundle"
        raise click.UsageError(
            f"{name} cannot be combined with --against or --against-config; remove one of them"
        )
    if bundle_file and url is not None:
        raise click.UsageError("--bundle cannot be combined with --url; remove one of them")
    config = read_config(flags)
    bundle = opened(bundle_file)
    # The agent on this machine knows nothing about the node of a file.
    elsewhere = bundle or (files and url is None)
    agent = None if elsewhere else ask_agent(url, flags, filename, slices="all")
    same_settings = against is not None and against_config is None
    settings = "" if same_settings else str(flags.get("config", "" if flags else "default settings"))
    if bundle:
        side = _side_of_bundle(bundle, filename, config, flags)
    elif agent:
        side = _agent_side(agent)
    elif files:
        side = _side_of_node(filename, config, settings)
    else:
        side = _side(filename, _here(config) if of_node else config, settings)
    if of_node:
        rules = node_rules(files, bundle, side.config.iptables_backend.value, addresses)
        before, pairs = rules.title, _pairs_of_node(rules, side, families)
    else:
        other = _other(side, against, against_config, flags)
        before, pairs = other.title, _pairs(other, side, families, addresses)
    differs = (_show_meaning if meaning else _show)(pairs, before, side.title, output)
    raise SystemExit(DIFFERENT if differs else 0)


def _side_of_bundle(
    bundle: Bundle, filename: str | None, config: Config, flags: Mapping[str, object]
) -> _Side:
    """Return the side of the desired rules of a bundle's node: options come before what the bundle has."""
    elsewhere = filename is not None or any(it in flags for it in ("kubeconfig", "master"))
    try:
        agent = bundled_agent(bundle)
    except NoObjects:
        if not elsewhere:
            raise
        agent = None
    settings = str(flags.get("config", "" if flags else "default settings"))
    if agent and agent.config and not flags:
        config, settings = agent.config, f"the configuration in {bundle.name}"
    elif not flags:
        click.echo(_NO_SETTINGS, err=True)
    config = msgspec.structs.replace(
        config, hostname_override=config.hostname_override or bundle.manifest.node
    )
    if elsewhere or agent is None:
        return _side(filename, config, settings)
    if agent.config and not flags:
        state = AgentState(agent.objects, config, bundle.name)
        return _agent_side(state, f"objects and configuration in {bundle.name}")
    return _Side(_title(f"objects in {bundle.name}", settings), agent_objects(agent.objects), config)


def _agent_side(agent: AgentState, title: str = "objects and configuration of the agent") -> _Side:
    if quarantined := sorted({str(it.port_name) for it in agent.objects.quarantined}):
        click.echo(f"The agent has quarantined {listed(quarantined, 5)}; their rules differ.", err=True)
    config = msgspec.structs.replace(agent.config, hostname_override=agent.objects.node.name)
    return _Side(title, agent_objects(agent.objects), config)


def _here(config: Config) -> Config:
    """Return the configuration for this node, unless it names another one."""
    return msgspec.structs.replace(config, hostname_override=config.hostname_override or host_name())


def _side(filename: str | None, config: Config, settings: str) -> _Side:
    """Return the side of the desired rules."""
    if filename is None:
        return _Side(_title("API server", settings), all_objects(config), config)
    return _Side(_title(filename, settings), Source(*read_objects(filename, config)), config)


def _side_of_node(filename: str | None, config: Config, settings: str) -> _Side:
    """Return the side of the desired rules of a node that the options or the objects name."""
    if config.hostname_override or filename is not None:
        side = _side(filename, config, settings)
        if side.source.node.name:
            return side
    raise click.ClickException("--rules does not tell the name of the node; give it with --hostname-override")


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


def _pairs_of_node(rules: NodeRules, side: _Side, families: tuple[Family, ...]) -> list[_Pair]:
    pairs = []
    for ruleset, facts in rules.with_facts(families, bool(side.config.node_port_addresses)):
        desired = side.ruleset(ruleset.family, facts)
        pairs.append(_Pair(ruleset, desired, side.addresses(facts)))
    return pairs


def _pairs(
    other: _Side, side: _Side, families: tuple[Family, ...], addresses: tuple[str, ...]
) -> list[_Pair]:
    facts = KernelFacts(addresses=addresses)
    return [
        _Pair(other.ruleset(it, facts), side.ruleset(it, facts), side.addresses(facts)) for it in families
    ]


def _show(pairs: list[_Pair], before: str, after: str, output: str) -> bool:
    """Print how the texts of rules differ. Return whether they do."""
    found = [compare(own_part(it.before, it.after), it.after) for it in pairs]
    match output:
        case "json":
            echo_json(views.document(found, before, after))
        case "rules":
            echo_styled(views.unified(found, before, after))
        case _:
            echo_styled(views.text(found, before, after))
    return _conclude(any(it.chains for it in found), before, after, output)


def _show_meaning(pairs: list[_Pair], before: str, after: str, output: str) -> bool:
    """Print what packets get instead. Return whether there are such packets."""
    found = [
        change
        for it in pairs
        for change in compare_meaning(
            proxy_part(it.before), proxy_part(it.after), Host(frozenset(it.addresses))
        )
    ]
    if output == "json":
        echo_json(meaning_views.document(found, before, after))
    else:
        echo_styled(meaning_views.text(found, before, after))
    return _conclude(bool(found), before, after, output)


def _conclude(differs: bool, before: str, after: str, output: str) -> bool:
    if output == "words" and not differs:
        click.echo(f"No differences: {before}, {after}.", err=True)
    return differs
