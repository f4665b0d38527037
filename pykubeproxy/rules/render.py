"""All rules at once: the whole Ruleset that a family ought to have."""

from collections.abc import Mapping

import msgspec

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.context import RuleContext
from pykubeproxy.rules.dispatch import shared_chain
from pykubeproxy.rules.options import LARGE_CLUSTER_ENDPOINTS, RuleOptions
from pykubeproxy.rules.plan import Chain, Change, restore_input
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import PortRules, Rules, port_rules
from pykubeproxy.services.cluster import Cluster
from pykubeproxy.services.ports import PortName
from pykubeproxy.services.resolve import resolve_ports


def render(cluster: Cluster, terms: RuleContext) -> Ruleset:
    """The chains that the objects of a cluster call for on these terms; the jumps of the kernel's chains apart."""
    served = [
        item
        for service in cluster.services()
        for item in resolve_ports(
            cluster, service.key, terms.options.family, terms.place, terms.allow_external_ips
        )
    ]
    endpoints = sum(len(item.selection.verdicts) for item in served)
    options = msgspec.structs.replace(terms.options, large_cluster=endpoints > LARGE_CLUSTER_ENDPOINTS)
    rules = {item.port.name: port_rules(item.port, item.selection, options) for item in served}
    return assemble(rules, options, terms.node_port_jumps)


def assemble(ports: Mapping[PortName, PortRules], options: RuleOptions, node_port_jumps: Rules) -> Ruleset:
    """Put together the rules of all service ports with the chains that services share and the fixed ones."""
    chains: dict[ChainKey, Rules] = dict(skeleton.fixed_chains(options))
    names = sorted(ports)
    branches: list[tuple[str, Rules]] = []
    for key in skeleton.SHARED:
        tree = shared_chain(key, (ports[name].entries for name in names), node_port_jumps, options.dispatch)
        chains[key] = tree.root
        branches += tree.chains
    for owned in (branches, *(ports[name].chains for name in names)):
        chains.update((ChainKey("nat", chain), rules) for chain, rules in owned)
    return Ruleset(options.family, chains)


def full_input(ruleset: Ruleset, options: RuleOptions) -> str:
    """The input of iptables-restore --noflush that sets up empty tables with these rules, jumps and all."""
    ensured: dict[str, list[str]] = {}
    for key, rules in skeleton.JUMPS.items():
        ensured.setdefault(key.table, []).extend(f"-I {key.chain} {rule}" for rule in reversed(rules))
    chains = [Chain(key, rules) for key, rules in ruleset.chains.items()]
    change = Change(
        fixed=(*chains, Chain(skeleton.KUBELET_FIREWALL, skeleton.kubelet_firewall(options))),
        ensured={table: tuple(lines) for table, lines in ensured.items()},
    )
    return "".join(restore_input(change, None))
