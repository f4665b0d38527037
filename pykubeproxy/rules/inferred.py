"""Infer from the rules of another node what its kernel and its iptables support, and how its proxy is configured."""

import re
from collections import Counter
from collections.abc import Iterator

import msgspec

from pykubeproxy.objects import Family
from pykubeproxy.rules import names
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.iptables_save import parse_target, without_comment
from pykubeproxy.rules.nft_list import NftRule, NftRuleset, SetKey
from pykubeproxy.rules.options import LocalTraffic
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import PortName

_FORWARD = ChainKey("filter", names.FORWARD)
_POSTROUTING = ChainKey("nat", names.POSTROUTING)
_NODEPORTS = ChainKey("nat", names.NODEPORTS)
_SERVICES = ChainKey("nat", names.SERVICES)
_MARK_MASQ = ChainKey("nat", names.MARK_MASQ)
# A rule that masquerades traffic to a cluster IP: all of it, or what does not come from pods of the node.
_MASQUERADED = re.compile(
    r"(?:! -s (?P<local>\S+) )?-d \S+(?: ! -i (?P<interface>\S+))? -p \w+ .* -j KUBE-MARK-MASQ"
)
_CLUSTER_IP = re.compile(r'-d \S+ -p \w+ -m comment --comment "\S+ cluster IP" .* -j KUBE-SV[CL]-')
# Chains of external addresses; KUBE-XLB- up to version 1.23.
_EXTERNAL_PREFIXES = (names.EXTERNAL_PREFIX, "KUBE-XLB-")
_FROM_PODS = re.compile(r"-(?P<option>[si]) (?P<local>\S+) .*-j KUBE-SVC-")
_MARK = re.compile(r"-j MARK --(?:set-x|or-)mark (0x[0-9a-f]+)")


def inferred_facts(rules: Ruleset, addresses: tuple[str, ...]) -> KernelFacts:
    """Return the facts with which a proxy writes such rules; without such rules, those of a kernel with all features.

    A feature is missing only if the rule that would use it is there without it.
    """
    masquerade = [rule for rule in rules.chains.get(_POSTROUTING, ()) if "-j MASQUERADE" in rule]
    node_ports = rules.chains.get(_NODEPORTS, ())
    forward = [without_comment(rule) for rule in rules.chains.get(_FORWARD, ())]
    invalid = [rule for rule in forward if "--ctstate INVALID" in rule]
    # In a dispatch tree, rules for node ports stand in other chains.
    counting = invalid or (rule for _, some in rules.of_table("nat") for rule in some)
    return KernelFacts(
        addresses=addresses,
        random_fully=not masquerade or any("--random-fully" in rule for rule in masquerade),
        nfacct=not (invalid or node_ports) or any("--nfacct-name" in rule for rule in counting),
        tcp_be_liberal=bool(forward) and not invalid,
    )


class InferredSettings(msgspec.Struct, frozen=True):
    """The settings of a proxy that its rules show, in one family.

    - `masquerade_bit`: the bit of the packet mark that requests masquerading
    - `masquerade_all`: all traffic to cluster IPs is masqueraded
    - `local_traffic`: how the proxy matches packets of the node's pods; None if it does not
    - `localhost_node_ports`: node ports are served on 127.0.0.0/8; True on IPv6
    - `node_port_jumps`: the rules that lead to the node ports
    - `serves`: there are rules for cluster IPs, without which little can be inferred
    """

    masquerade_bit: int = 14
    masquerade_all: bool = False
    local_traffic: LocalTraffic | None = None
    localhost_node_ports: bool = True
    node_port_jumps: tuple[str, ...] = ()
    serves: bool = False


def inferred_settings(rules: Ruleset) -> InferredSettings | None:
    """Return the settings with which most rules agree; None if there are no rules of a service proxy.

    Single Services whose rules follow from other settings do not count.
    """
    if _SERVICES not in rules.chains:
        return None
    jumps = tuple(rule for rule in rules.chains[_SERVICES] if parse_target(rule) == names.NODEPORTS)
    served = sum(1 for rule in rules.chains[_SERVICES] if _CLUSTER_IP.match(rule))
    most_common = Counter(_masqueraded(rules)).most_common(1)
    how, number = most_common[0] if most_common else (None, 0)
    if 2 * number < served:
        how = None
    masquerade_all = how == LocalTraffic()
    if masquerade_all or how is None:
        how = next((found for found, _ in Counter(_local(rules)).most_common(1)), None)
    return InferredSettings(
        masquerade_bit=_masquerade_bit(rules),
        masquerade_all=masquerade_all,
        local_traffic=how,
        localhost_node_ports=rules.family is Family.IPV6 or any(map(_matches_loopback, jumps)),
        node_port_jumps=jumps,
        serves=served > 0,
    )


def keeps_affinity(rules: Ruleset, port: PortName) -> bool | None:
    """Return whether clients of a service port keep their endpoint; None if no chain balances its traffic."""
    chains = (ChainKey("nat", chain) for chain in (names.cluster_chain(port), names.local_chain(port)))
    found = [rules.chains[chain] for chain in chains if chain in rules.chains]
    return any("-m recent --rcheck" in rule for some in found for rule in some) if found else None


def _matches_loopback(jump: str) -> bool:
    """Return whether a jump to the node ports matches 127.0.0.1, by its address or without one."""
    return jump.startswith("-d 127.") or not jump.startswith(("-d ", "! -d "))


def _masqueraded(rules: Ruleset) -> Iterator[LocalTraffic]:
    """Yield for each cluster IP what is not masqueraded; an empty value for nothing."""
    for rule in _marking(rules):
        # The same rules for external IPs differ by policy.
        if " external IP" not in rule and (found := _MASQUERADED.match(rule)):
            yield LocalTraffic(source=found["local"] or "", interface=found["interface"] or "")


def _marking(rules: Ruleset) -> Iterator[str]:
    """Yield the rules that masquerade traffic to cluster IPs; versions up to 1.23 have them in KUBE-SERVICES."""
    for key, some in rules.chains.items():
        if key == _SERVICES:
            yield from (rule for rule in some if rule.endswith("-j KUBE-MARK-MASQ"))
        elif key.table == "nat" and key.chain.startswith((names.CLUSTER_PREFIX, names.LOCAL_PREFIX)):
            yield from (rule for rule in some[:1] if rule.endswith("-j KUBE-MARK-MASQ"))


def _local(rules: Ruleset) -> Iterator[LocalTraffic]:
    """Yield for each external address under policy Local what comes from pods of the node."""
    for key, some in rules.chains.items():
        if key.table == "nat" and key.chain.startswith(_EXTERNAL_PREFIXES):
            for rule in some:
                if found := _FROM_PODS.match(rule):
                    local = found["local"]
                    yield (
                        LocalTraffic(source=local)
                        if found["option"] == "s"
                        else LocalTraffic(interface=local)
                    )


def _masquerade_bit(rules: Ruleset) -> int:
    for rule in rules.chains.get(_MARK_MASQ, ()):
        if (found := _MARK.search(rule)) and (mark := int(found[1], 16)):
            return mark.bit_length() - 1
    return InferredSettings().masquerade_bit


def inferred_nft_settings(rules: NftRuleset) -> InferredSettings | None:
    """Return the settings of a kube-proxy in nftables mode; None if there are no rules of it.

    Its node ports are served at `nft_node_port_addresses`, which the jumps in this value do not tell.
    """
    chains = {key.chain: chain for key, chain in rules.chains.items() if key.table in names.NFT_TABLES}
    if "services" not in chains:
        return None
    marking = [rule for rule in chains["services"].rules if _nft_mark(rule)]
    shortcuts = (
        rule for name, chain in chains.items() if name.startswith("external-") for rule in chain.rules
    )
    loopback = "127.0.0.0/8" if rules.family is Family.IPV4 else "::1/128"
    return InferredSettings(
        masquerade_bit=max(map(_nft_mark, marking), default=1 << 14).bit_length() - 1,
        masquerade_all=any(_nft_local(rule) is None for rule in marking),
        local_traffic=next(filter(None, map(_nft_local, (*marking, *shortcuts))), None),
        localhost_node_ports=rules.family is Family.IPV6,
        node_port_jumps=(f"! -d {loopback} -m addrtype --dst-type LOCAL -j {names.NODEPORTS}",),
        serves=True,
    )


def nft_node_port_addresses(rules: NftRuleset) -> frozenset[str] | None:
    """Return where a kube-proxy in nftables mode serves node ports; None for all addresses except those of loopback."""
    found = (rules.sets.get(SetKey(table, "nodeport-ips")) for table in names.NFT_TABLES)
    return next((frozenset(map(str, one.elements)) for one in found if one), None)


def _nft_mark(rule: NftRule) -> int:
    """Return the bits that a rule sets in the mark of packets; 0 for none."""
    match rule.statements:
        case [*_, {"mangle": {"key": {"meta": {"key": "mark"}}, "value": {"|": [_, int(bits)]}}}]:
            return bits
    return 0


def _nft_local(rule: NftRule) -> LocalTraffic | None:
    """Return what a rule takes for packets of the node's pods; None if it does not."""
    for statement in rule.statements:
        match statement:
            case {"match": {"left": {"payload": {"field": "saddr"}}, "right": {"prefix": network}}}:
                match network:
                    case {"addr": address, "len": length}:
                        return LocalTraffic(source=f"{address}/{length}")
            case {"match": {"left": {"meta": {"key": "iifname"}}, "right": str(interface)}}:
                return LocalTraffic(interface=interface.replace("*", "+"))
    return None
