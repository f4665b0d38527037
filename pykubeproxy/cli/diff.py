"""`pykubeproxy diff`: compare live rules, or those of other objects or settings, with the desired rules."""

from typing import NamedTuple

import click

from pykubeproxy import garbage
from pykubeproxy.cli import sides
from pykubeproxy.cli.bundle_files import bundle_option, opened
from pykubeproxy.cli.flags import (
    CONTEXT_SETTINGS,
    choice_option,
    config_options,
    family_option,
    filename_option,
    node_address_option,
    read_config,
    rules_option,
)
from pykubeproxy.cli.help import DIFFERENT, OUTPUT, QUESTION, command, option
from pykubeproxy.cli.node_rules import NodeRules, node_rules, rules_errors
from pykubeproxy.cli.running_agent import ask_agent, url_option
from pykubeproxy.cli.sides import Side
from pykubeproxy.cli.terminal import echo_json, echo_line, echo_styled
from pykubeproxy.inspect.diff import render as views
from pykubeproxy.inspect.diff.model import compare
from pykubeproxy.inspect.trace.packet import Host
from pykubeproxy.objects import Family
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.difference import own_part
from pykubeproxy.rules.ruleset import Ruleset


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
    objects come from files, with --kubeconfig from the API server; other flags of `run` replace the configuration. A
    bundle of kube-proxy may lack its configuration: then settings are inferred from the rules.

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
    garbage.collect_rarely()
    config = read_config(flags)
    bundle = opened(bundle_file)
    if bundle:
        side = sides.of_bundle(bundle, filename, config, flags)
    # The agent on this machine knows nothing about the node of a file.
    elif (not files or url is not None) and (agent := ask_agent(url, flags, filename, slices="all")):
        side = sides.of_agent(agent)
    elif files:
        side = sides.of_named_node(filename, config, sides.settings_title(flags))
    elif of_node:
        side = sides.of_this_node(filename, config, sides.settings_title(flags))
    else:
        # Titles name the configurations only if they differ.
        settings = sides.settings_title(flags) if against_config is not None else ""
        side = sides.of_objects(filename, config, settings)
    if of_node:
        rules = node_rules(files, bundle, side.config.iptables_backend.value, addresses)
        before, pairs = rules.title, _pairs_of_node(rules, side, families)
    else:
        other = sides.other(side, against, against_config, flags)
        before, pairs = other.title, _pairs(other, side, families, addresses)
    differs = (_show_meaning if meaning else _show)(pairs, before, side.title, output)
    raise SystemExit(DIFFERENT if differs else 0)


def _pairs_of_node(rules: NodeRules, side: Side, families: tuple[Family, ...]) -> list[_Pair]:
    pairs = []
    for ruleset, facts in rules.with_facts(families, bool(side.config.node_port_addresses)):
        desired = side.infer(ruleset) if side.infer else side.ruleset(ruleset.family, facts)
        pairs.append(_Pair(ruleset, desired, side.addresses(facts)))
    return pairs


def _pairs(other: Side, side: Side, families: tuple[Family, ...], addresses: tuple[str, ...]) -> list[_Pair]:
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
    from pykubeproxy.inspect.meaning import render as meaning_views
    from pykubeproxy.inspect.meaning.model import compare_meaning, proxy_part

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
        echo_line(f"No differences: {before}, {after}.", err=True)
    return differs
