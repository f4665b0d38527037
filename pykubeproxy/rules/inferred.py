"""Infer from the rules of another node what its kernel and its iptables support, and how its proxy is configured."""

import re
from collections import Counter
from collections.abc import Iterator

import msgspec

from pykubeproxy.rules import names
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.options import LocalTraffic
from pykubeproxy.rules.parse import parse_target, without_comment
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

_FORWARD = ChainKey("filter", names.FORWARD)
_POSTROUTING = ChainKey("nat", names.POSTROUTING)
_NODEPORTS = ChainKey("nat", names.NODEPORTS)
_SERVICES = ChainKey("nat", names.SERVICES)
_MARK_MASQ = ChainKey("nat", names.MARK_MASQ)
# A rule that masquerades traffic to a cluster IP: all of it, or what does not come from pods of the node.
_MASQUERADED = re.compile(
    r"(?:! -s (?P<local>\S+) )?-d \S+(?P<interface> ! -i \S+)? -p \w+ .* -j KUBE-MARK-MASQ"
)
_CLUSTER_IP = re.compile(r'-d \S+ -p \w+ -m comment --comment "\S+ cluster IP" .* -j KUBE-SV[CL]-')
_MARK = re.compile(r"-j MARK --(?:set-x|or-)mark (0x[0-9a-f]+)")


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


class InferredSettings(msgspec.Struct, frozen=True):
    """The settings of a proxy that its rules show, in one family.

    - `masquerade_bit`: the bit of the packet mark that requests masquerading
    - `masquerade_all`: all traffic to cluster IPs is masqueraded
    - `local_traffic`: how the proxy matches packets of the node's pods; None if it does not
    - `localhost_node_ports`: node ports are served on 127.0.0.0/8
    - `node_port_jumps`: the rules that lead to the node ports
    """

    masquerade_bit: int = 14
    masquerade_all: bool = False
    local_traffic: LocalTraffic | None = None
    localhost_node_ports: bool = True
    node_port_jumps: tuple[str, ...] = ()


def inferred_settings(rules: Ruleset) -> InferredSettings | None:
    """Return the settings with which most rules agree; None if there are no rules of a service proxy.

    Single Services whose rules follow from other settings do not count.
    """
    if _SERVICES not in rules.chains:
        return None
    jumps = tuple(it for it in rules.chains[_SERVICES] if parse_target(it) == names.NODEPORTS)
    most_common = Counter(_masqueraded(rules)).most_common(1)
    how, number = most_common[0] if most_common else (None, 0)
    if 2 * number < sum(1 for it in rules.chains[_SERVICES] if _CLUSTER_IP.match(it)):
        how = None
    return InferredSettings(
        masquerade_bit=_masquerade_bit(rules),
        masquerade_all=how == LocalTraffic(),
        local_traffic=how if how != LocalTraffic() else None,
        localhost_node_ports=not any(it.startswith("! -d 127.0.0.0/8 ") for it in jumps),
        node_port_jumps=jumps,
    )


def _masqueraded(rules: Ruleset) -> Iterator[LocalTraffic]:
    """Yield for each cluster IP what is not masqueraded; an empty value for nothing."""
    for key, some in rules.chains.items():
        # Versions up to 1.23 have these rules in KUBE-SERVICES.
        if key == _SERVICES or (
            key.table == "nat" and key.chain.startswith((names.CLUSTER_PREFIX, names.LOCAL_PREFIX))
        ):
            for rule in some if key == _SERVICES else some[:1]:
                if rule.endswith("-j KUBE-MARK-MASQ") and (found := _MASQUERADED.match(rule)):
                    if " external IP" in rule or " loadbalancer IP" in rule:
                        continue
                    if found["interface"]:
                        yield LocalTraffic(interface=found["interface"].rpartition(" ")[2])
                    else:
                        yield LocalTraffic(source=found["local"] or "")


def _masquerade_bit(rules: Ruleset) -> int:
    for rule in rules.chains.get(_MARK_MASQ, ()):
        if (found := _MARK.search(rule)) and (mark := int(found[1], 16)):
            return mark.bit_length() - 1
    return InferredSettings().masquerade_bit
