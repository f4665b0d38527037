"""Infer from the rules of another node what its kernel and its iptables support."""

from pykubeproxy.rules import names
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.parse import without_comment
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

_FORWARD = ChainKey("filter", names.FORWARD)
_POSTROUTING = ChainKey("nat", names.POSTROUTING)
_NODEPORTS = ChainKey("nat", names.NODEPORTS)


def inferred_facts(rules: Ruleset, addresses: tuple[str, ...]) -> KernelFacts:
    """Return the facts with which a proxy writes such rules; without such rules, those of a kernel with all features.

    A feature is missing only if the rule that would use it is there without it.
    """
    masquerade = [it for it in rules.chains.get(_POSTROUTING, ()) if "-j MASQUERADE" in it]
    node_ports = rules.chains.get(_NODEPORTS, ())
    forward = [without_comment(it) for it in rules.chains.get(_FORWARD, ())]
    invalid = [it for it in forward if "--ctstate INVALID" in it]
    # In a dispatch tree, rules for node ports stand in other chains.
    counting = invalid or (rule for _, some in rules.of_table("nat") for rule in some)
    return KernelFacts(
        addresses=addresses,
        random_fully=not masquerade or any("--random-fully" in it for it in masquerade),
        nfacct=not (invalid or node_ports) or any("--nfacct-name" in it for it in counting),
        tcp_be_liberal=bool(forward) and not invalid,
    )
