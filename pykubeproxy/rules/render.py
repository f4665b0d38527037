"""Render the whole Ruleset of a cluster."""

from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.dispatch import shared_chain
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS, RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Entries, Rules, Ruleset
from pykubeproxy.rules.service import port_rules, reject_service
from pykubeproxy.rules.text import Chain, block, join, write_chains
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName, whole_service
from pykubeproxy.services.selection import ResolvedPort
from pykubeproxy.services.size import Oversized


class ServiceRules(Protocol):
    """The rules of one service port. See PortRules."""

    @property
    def entries(self) -> Entries:
        """Return the rules in shared chains."""

    def chains(self) -> Iterable[tuple[str, Rules]]:
        """Return the own chains."""


def render(cluster: Cluster, context: RuleContext) -> Ruleset:
    """Return the chains for all Services of a cluster, without the jumps in the built-in chains."""
    resolved: list[ResolvedPort] = []
    too_large: list[Oversized] = []
    for service in cluster.services():
        found = context.resolve(cluster, service.key)
        if isinstance(found, Oversized):
            too_large.append(found)
        else:
            resolved += found
    endpoints = sum(len(port.selection.verdicts) for port in resolved)
    options = msgspec.structs.replace(context.options, large_cluster=endpoints > LARGE_CLUSTER_ENDPOINTS)
    rules = {port.port.name: port_rules(port.port, port.selection, options) for port in resolved}
    rules |= {
        whole_service(service.service): reject_service(service.service, service.cluster_ip, options)
        for service in too_large
    }
    return assemble(rules, options, context.node_port_jumps)


def assemble(ports: Mapping[PortName, ServiceRules], options: RuleOptions, node_port_jumps: Rules) -> Ruleset:
    """Return the rules of service ports together with the shared and the fixed chains."""
    chains: dict[ChainKey, Rules] = dict(skeleton.fixed_chains(options))
    names = sorted(ports)
    for key in skeleton.SHARED:
        tree = shared_chain(key, (ports[name].entries for name in names), node_port_jumps, options.dispatch)
        chains[key] = tree.root
        chains.update((ChainKey(key.table, chain), rules) for chain, rules in tree.chains)
    for name in names:
        chains.update((ChainKey("nat", chain), rules) for chain, rules in ports[name].chains())
    return Ruleset(options.family, chains)


def installed(rendered: Ruleset, options: RuleOptions) -> Ruleset:
    """Return a rendered Ruleset with the jumps and the kubelet's chain: what it leaves in tables that were empty."""
    firewall = {skeleton.KUBELET_FIREWALL: skeleton.kubelet_firewall(options)}
    return Ruleset(rendered.family, {**skeleton.JUMPS, **firewall, **rendered.chains})


def full_input(ruleset: Ruleset, options: RuleOptions) -> str:
    """Return the input of iptables-restore --noflush that writes these rules, with all jumps, into empty tables."""
    chains = [Chain(key, rules) for key, rules in ruleset.chains.items()]
    chains.append(Chain(skeleton.KUBELET_FIREWALL, skeleton.kubelet_firewall(options)))
    return "".join(
        block(
            table,
            write_chains([chain for chain in chains if chain.key.table == table]),
            join(
                f"-I {key.chain} {rule}"
                for key, rules in skeleton.JUMPS.items()
                if key.table == table
                for rule in reversed(rules)
            ),
        )
        for table in ("mangle", "filter", "nat")
    )
