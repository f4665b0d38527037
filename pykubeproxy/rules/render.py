"""All rules at once: the whole Ruleset that a family ought to have."""

from collections.abc import Iterable, Mapping

from pykubeproxy.rules import skeleton
from pykubeproxy.rules.dispatch import shared_chain
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import PortRules, Rules, port_rules
from pykubeproxy.services.ports import PortName, ServicePort
from pykubeproxy.services.selection import Selection


def render(
    ports: Iterable[tuple[ServicePort, Selection]], options: RuleOptions, node_port_jumps: Rules
) -> Ruleset:
    """The chains that service ports and their selected backends call for, without the jumps of the kernel's chains."""
    rendered = {port.name: port_rules(port, selection, options) for port, selection in ports}
    return assemble(rendered, options, node_port_jumps)


def assemble(rendered: Mapping[PortName, PortRules], options: RuleOptions, node_port_jumps: Rules) -> Ruleset:
    """Put together rules that are already written for each service port."""
    chains: dict[ChainKey, Rules] = dict(skeleton.fixed_chains(options))
    for key in skeleton.SHARED:
        chains[key] = shared_chain(key, rendered, node_port_jumps)
    for name in sorted(rendered):
        chains.update((ChainKey("nat", chain), rules) for chain, rules in rendered[name].chains)
    return Ruleset(options.family, chains)
