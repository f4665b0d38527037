"""check --migrate-to: what clients notice when a node changes the mode of its kube-proxy."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from pykubeproxy.inspect.check.migration import IPTABLES, NFTABLES, Migration, migration, nft_version
from pykubeproxy.inspect.check.report import Finding, Level
from pykubeproxy.inspect.node import NodeRules, NodeState, Origin, UnknownNode
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.inspect.packets.rule_set import RuleSet
from pykubeproxy.inspect.packets.walk import walk
from pykubeproxy.inspect.routes import FrontendRule, PacketVerdict, serving_rules
from pykubeproxy.objects import Family, Node, Port, Protocol, Service, family_of
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import FrontendKind
from tests.cases import ADDRESSES, NAMES, NETWORK, expected, load_case, nft_tables, node_of

NODE = Node("n1", ("192.168.99.10", "fd00:99::10"), kernel="6.12.0-55.el10_0.x86_64")
FILTER_FORWARD, NAT_PREROUTING = ChainKey("filter", "FORWARD"), ChainKey("nat", "PREROUTING")


def case_rules(name: str, mode: str) -> Mapping[Family, NodeRules]:
    if mode == IPTABLES:
        return {family: NodeRules(expected(load_case(name), family)) for family in Family}
    return {
        family: NodeRules(Ruleset(family, {}), nftables=nft)
        for family in Family
        if (nft := nft_tables(name, family)).chains
    }


def state_of(
    name: str, mode: str = IPTABLES, *, node: Node = NODE, network: NodeNetwork = NETWORK
) -> NodeState:
    return NodeState(node, Origin("rules"), case_rules(name, mode), network)


def changed(state: NodeState, chain: ChainKey, *rules: str, policy: str = "") -> NodeState:
    """Return a state with more rules of IPv4 at the end of a chain."""
    of_family = state.rules[Family.IPV4]
    saved = of_family.ruleset
    chains = {**saved.chains, chain: (*saved.chains.get(chain, ()), *rules)}
    policies = {chain: policy} if policy else {}
    ruleset = msgspec.structs.replace(saved, chains=chains, policies=policies)
    rules_now = {Family.IPV4: msgspec.structs.replace(of_family, ruleset=ruleset)}
    return msgspec.structs.replace(state, rules=rules_now)


def found(state: NodeState | UnknownNode, to: str = NFTABLES, **settings: object) -> list[Finding]:
    return list(migration(msgspec.structs.replace(Migration(to), **settings), state))


def messages(findings: list[Finding], level: Level, check: str = "") -> list[str]:
    return [one.message for one in findings if one.level is level and check in ("", one.check)]


def no_longer_served(name: str, family: Family) -> set[str]:
    """Return the node's addresses at which recorded rules translate packets to a node port in iptables mode only."""
    before, after = (case_rules(name, mode)[family].rule_sets for mode in (IPTABLES, NFTABLES))
    ports = [
        one
        for one in serving_rules(expected(load_case(name), family))
        if one.frontend.kind is FrontendKind.NODE_PORT
    ]
    return {
        address
        for one in ports
        for address in ADDRESSES
        if family_of(address) is family
        and is_translated(before, one, address)
        and not is_translated(after, one, address)
    }


def is_translated(rules: Sequence[RuleSet], one: FrontendRule, address: str) -> bool:
    packet = Packet(one.protocol.lower(), address, address, one.frontend.port, starts_here=True)
    return any(end.verdict is PacketVerdict.DNAT for end in walk(rules, packet, NETWORK).ends)


@pytest.mark.parametrize("name", NAMES)
def test_node_ports_agree_with_what_recorded_modes_do(name: str) -> None:
    state = state_of(name, node=msgspec.structs.replace(node_of(load_case(name)), kernel="6.1.0"))
    findings = found(state, node_port_addresses=load_case(name)["config"].get("nodePortAddresses") or ())
    for family in Family:
        if not nft_tables(name, family).chains:
            continue
        named = {
            address
            for one in findings
            if one.level is Level.FAIL and one.check == "node-ports" and one.family is family
            for address in ADDRESSES
            if f" at {address}" in one.message
            or f" {address} and" in one.message
            or f"and {address} " in one.message
        }
        assert named == no_longer_served(name, family)
    assert not messages(findings, Level.FAIL, "foreign-rules")
    assert not messages(findings, Level.FAIL, "firewall")


@pytest.mark.parametrize("name", NAMES)
def test_way_back_breaks_nothing(name: str) -> None:
    findings = found(state_of(name, NFTABLES), IPTABLES)
    assert not messages(findings, Level.FAIL)


def test_settings_that_keep_node_ports() -> None:
    served = found(state_of("nodeport"), node_port_addresses=("0.0.0.0/0", "::/0"))
    assert messages(served, Level.FAIL) == [
        "node ports are not served at 127.0.0.1 in nftables mode, whatever its settings: ns1/web:http (30080)"
    ]
    (lost, _) = messages(found(state_of("nodeport")), Level.FAIL)
    assert lost == "node ports are not served at 10.244.1.1 in nftables mode: ns1/web:http (30080)"


def test_addresses_that_are_not_known() -> None:
    """From another machine, only the addresses of the Node are known."""
    network = NodeNetwork(frozenset(NODE.addresses))
    (warning,) = messages(found(state_of("nodeport", network=network)), Level.WARN, "node-ports")
    assert warning == (
        "node ports are served at 192.168.99.10 only in nftables mode, at all addresses of the node now:"
        " ns1/web:http (30080)"
    )


@pytest.mark.parametrize(
    ("chain", "rule", "level", "message"),
    [
        (FILTER_FORWARD, "-s 10.0.0.0/8 -j KUBE-SERVICES", Level.FAIL, "a rule refers to a chain of the proxy"),
        (NAT_PREROUTING, "-p tcp -j KUBE-MARK-MASQ", Level.FAIL, "a rule refers to a chain of the proxy"),
        (ChainKey("nat", "KUBE-SERVICES"), "-d 10.0.0.1/32 -j ACCEPT", Level.FAIL, "a rule that is not the proxy's"),
        (ChainKey("filter", "KUBE-FORWARD"), "-j ACCEPT", Level.FAIL, "a rule that is not the proxy's"),
        (FILTER_FORWARD, "-m mark --mark 0x4000/0x4000 -j ACCEPT", Level.WARN, "a rule depends on the marks"),
        (FILTER_FORWARD, "-m mark --mark 0x40000/0x40000 -j ACCEPT", Level.OK, "no rules of other programs"),
    ],
)  # fmt: skip
def test_foreign_rules(chain: ChainKey, rule: str, level: Level, message: str) -> None:
    findings = [
        one for one in found(changed(state_of("nodeport"), chain, rule)) if one.check == "foreign-rules"
    ]
    (finding,) = [one for one in findings if one.family is Family.IPV4]
    assert finding.level is level
    assert finding.message.startswith(message)
    assert level is Level.OK or finding.message.endswith(
        f"in chain {chain.chain} of table {chain.table}: {rule}"
    )


@pytest.mark.parametrize(
    ("rules", "policy", "expected_rule"),
    [
        ((), "DROP", "policy DROP"),
        (("-i eth0 -j REJECT --reject-with icmp-port-unreachable",), "", "-i eth0 -j REJECT"),
        (("-m conntrack --ctstate DNAT -j ACCEPT",), "DROP", ""),
        (("-s 192.0.2.0/24 -j DROP",), "", ""),
    ],
)
def test_rules_that_iptables_mode_precedes(rules: tuple[str, ...], policy: str, expected_rule: str) -> None:
    """KUBE-FORWARD accepts masqueraded packets before them; nftables mode accepts none."""
    state = changed(state_of("nodeport"), FILTER_FORWARD, *rules, policy=policy)
    named = messages(found(state), Level.FAIL, "firewall")
    assert bool(named) is bool(expected_rule)
    assert all(
        "chain FORWARD of table filter" in one and expected_rule in one and "ns1/web:http" in one
        for one in named
    )


def test_clients_that_get_another_answer() -> None:
    there = messages(found(state_of("no-endpoints-lb")), Level.WARN)
    back = messages(found(state_of("no-endpoints-lb", NFTABLES), IPTABLES), Level.WARN)
    for texts, change in ((there, "pass now, rejected afterwards"), (back, "rejected now, pass afterwards")):
        assert any(text.startswith("packets to ports of ") and change in text for text in texts)
        assert any(text.startswith("packets of the node itself to ") and change in text for text in texts)


def test_node_ports_that_become_reachable() -> None:
    (opened,) = messages(found(state_of("nodeport", NFTABLES), IPTABLES), Level.WARN, "node-ports")
    assert opened == "node ports are served at 10.244.1.1 and 127.0.0.1 too: ns1/web:http (30080)"


@pytest.mark.parametrize(
    ("mode", "to", "release", "level"),
    [
        (IPTABLES, NFTABLES, "5.10.0-8-amd64", Level.FAIL),
        (IPTABLES, NFTABLES, "5.13.0", Level.OK),
        (IPTABLES, NFTABLES, "6.12.0-55.el10_0.x86_64", Level.OK),
        (IPTABLES, NFTABLES, "", Level.SKIP),
        (NFTABLES, IPTABLES, "6.12.0-55.el10_0.x86_64", Level.WARN),
        (NFTABLES, IPTABLES, "5.14.0-503.el9.x86_64", None),
    ],
)
def test_kernel(mode: str, to: str, release: str, level: Level | None) -> None:
    state = state_of("nodeport", mode, node=msgspec.structs.replace(NODE, kernel=release))
    assert [one.level for one in found(state, to) if one.check == "kernel"] == ([level] if level else [])


@pytest.mark.parametrize(
    ("printed", "level"),
    [
        ("nftables v1.0.6 (Lester Gooch #5)", Level.OK),
        ("nftables v0.9.8 (E.D.S.)", Level.FAIL),
        ("", Level.SKIP),
    ],
)
def test_nft(printed: str, level: Level) -> None:
    assert nft_version(printed).level is level


def test_node_in_the_mode_already() -> None:
    (only,) = found(state_of("nodeport"), IPTABLES)
    assert (only.level, only.message) == (Level.OK, "the node is in iptables mode already")


def test_ipvs() -> None:
    node = UnknownNode(NODE, "runs kube-proxy v1.35.1 in IPVS mode", True, "ipvs")
    web = Service("default", "web", "NodePort", ("10.96.0.9",), (Port("", Protocol.TCP, 80, 30080),))
    findings = found(node, services=(web,))
    assert [one.check for one in findings if one.level is Level.WARN] == ["ipvs", "ipvs", "node-ports"]
    assert messages(findings, Level.WARN, "node-ports")[0].endswith(" now: default/web (30080)")
    (left,) = messages(found(node, IPTABLES), Level.FAIL)
    assert left.startswith("kube-proxy in iptables mode leaves the virtual servers of ipvs mode")


def test_node_without_a_proxy() -> None:
    node = UnknownNode(NODE, "runs Cilium and no kube-proxy", by_design=True)
    (only,) = found(node)
    assert only.level is Level.SKIP
    assert "runs Cilium" in only.message
