"""Shares of endpoints: probabilities in rules, multiplied along the path."""

import pytest

from pykubeproxy.inspect.dump.model import views
from pykubeproxy.inspect.routes import affinity_seconds, shares
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import parse
from pykubeproxy.rules.ruleset import ChainKey, Ruleset


def chains(**rules: list[str]) -> Ruleset:
    """Return chains of table nat; "_" in their names stands for "-"."""
    return Ruleset(
        Family.IPV4,
        {ChainKey("nat", name.replace("_", "-")): tuple(texts) for name, texts in rules.items()},
    )


def chance(probability: float, to: str) -> str:
    return f"-m statistic --mode random --probability {probability:.11f} -j {to}"


def dnat(address: str) -> list[str]:
    return [f"-s {address}/32 -j KUBE-MARK-MASQ", f"-p tcp -m tcp -j DNAT --to-destination {address}:80"]


def found(ruleset: Ruleset, chain: str = "KUBE-SVC-X") -> dict[str, float]:
    return {share.target: round(share.probability, 6) for share in shares(ruleset, chain)}


def test_earlier_rules_reduce_later_shares() -> None:
    ruleset = chains(
        KUBE_SVC_X=[chance(0.5, "KUBE-SEP-A"), chance(0.2, "KUBE-SEP-B"), "-j KUBE-SEP-C"],
        KUBE_SEP_A=dnat("10.0.0.1"),
        KUBE_SEP_B=dnat("10.0.0.2"),
        KUBE_SEP_C=dnat("10.0.0.3"),
    )
    assert found(ruleset) == {"10.0.0.1:80": 0.5, "10.0.0.2:80": 0.1, "10.0.0.3:80": 0.4}


def test_shares_multiply_through_groups() -> None:
    ruleset = chains(
        KUBE_SVC_X=[chance(0.75, "KUBE-SVC-G"), "-j KUBE-SVC-H"],
        KUBE_SVC_G=[chance(1 / 3, "KUBE-SEP-A"), "-j KUBE-SEP-B"],
        KUBE_SVC_H=["-j KUBE-SEP-C"],
        KUBE_SEP_A=dnat("10.0.0.1"),
        KUBE_SEP_B=dnat("10.0.0.2"),
        KUBE_SEP_C=dnat("10.0.0.3"),
    )
    assert found(ruleset) == {"10.0.0.1:80": 0.25, "10.0.0.2:80": 0.5, "10.0.0.3:80": 0.25}


def test_shares_of_a_repeated_endpoint_add_up() -> None:
    ruleset = chains(
        KUBE_SVC_X=[chance(0.5, "KUBE-SEP-A"), chance(0.5, "KUBE-SEP-B"), "-j KUBE-SEP-A"],
        KUBE_SEP_A=dnat("10.0.0.1"),
        KUBE_SEP_B=dnat("10.0.0.2"),
    )
    assert found(ruleset) == {"10.0.0.1:80": 0.75, "10.0.0.2:80": 0.25}


def test_returned_packets_meet_the_next_rule() -> None:
    """Packets that no rule takes reach no endpoint."""
    ruleset = chains(
        KUBE_SVC_X=["-j KUBE-MARK-MASQ", chance(0.5, "KUBE-SVC-G"), chance(0.5, "KUBE-SEP-A")],
        KUBE_SVC_G=[chance(0.5, "RETURN"), "-j KUBE-SEP-B"],
        KUBE_MARK_MASQ=["-j MARK --set-xmark 0x4000/0x4000"],
        KUBE_SEP_A=dnat("10.0.0.1"),
        KUBE_SEP_B=dnat("10.0.0.2"),
    )
    assert found(ruleset) == {"10.0.0.2:80": 0.25, "10.0.0.1:80": 0.375}


def test_affinity_rules_give_timeout_only() -> None:
    """They do not change the shares of new clients."""
    known = "-m recent --rcheck --seconds 90 --reap --name A --mask 255.255.255.255 --rsource -j KUBE-SEP-A"
    ruleset = chains(
        KUBE_SVC_X=[known, "-j KUBE-SEP-B"], KUBE_SEP_A=dnat("10.0.0.1"), KUBE_SEP_B=dnat("10.0.0.2")
    )
    assert found(ruleset) == {"10.0.0.2:80": 1.0}
    assert affinity_seconds(ruleset, "KUBE-SVC-X") == 90


TREE = """\
*nat
:KUBE-SERVICES - [0:0]
-A KUBE-SERVICES -d 0.0.0.1/0.0.0.15 -j KUBE-SVC-BRANCH1
-A KUBE-SERVICES -d 10.96.0.9/32 -p tcp -m comment --comment "ns/flat cluster IP" -m tcp --dport 80 -j KUBE-SVC-B
-A KUBE-SERVICES -m comment --comment "nodes" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-BRANCH1 -d 0.0.0.16/0.0.0.240 -j KUBE-SVC-BRANCH2
-A KUBE-SVC-BRANCH2 -d 10.96.0.17/32 -p tcp -m comment --comment "ns/deep:http cluster IP" -m tcp --dport 80 -j KUBE-SVC-A
-A KUBE-NODEPORTS -p tcp -m tcp --dport 30000:30255 -j KUBE-SVC-RANGE
-A KUBE-SVC-RANGE -p tcp -m comment --comment "ns/deep:http" -m tcp --dport 30080 -j KUBE-EXT-A
-A KUBE-EXT-A -m comment --comment "masquerade traffic for ns/deep:http external destinations" -j KUBE-MARK-MASQ
-A KUBE-EXT-A -j KUBE-SVC-A
-A KUBE-SVC-A -j KUBE-SEP-A
-A KUBE-SVC-B -j KUBE-SEP-B
-A KUBE-SEP-A -p tcp -m tcp -j DNAT --to-destination 10.0.0.1:80
-A KUBE-SEP-B -p tcp -m tcp -j DNAT --to-destination 10.0.0.2:80
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
"""


@pytest.mark.parametrize(
    ("service", "ways"), [("deep", [("10.96.0.17", 80), ("*", 30080)]), ("flat", [("10.96.0.9", 80)])]
)
def test_dispatch_branches_lead_to_services(service: str, ways: list[tuple[str, int]]) -> None:
    """By address and by port range."""
    (view,) = (v for v in views(parse(Family.IPV4, TREE), {}) if v.name.service == service)
    assert [(frontend.address, frontend.port) for frontend in view.frontends] == ways
    assert [endpoint.share for endpoint in view.endpoints] == [1.0]


@pytest.mark.parametrize("text", ["x", "nan", "-0.5", "1.5", "9" * 5000])
def test_an_unreadable_probability_takes_no_packets(text: str) -> None:
    """iptables writes none, but a file may have one."""
    ruleset = chains(
        KUBE_SVC_X=[f"-m statistic --mode random --probability {text} -j KUBE-SEP-A", "-j KUBE-SEP-B"],
        KUBE_SEP_A=dnat("10.0.0.1"),
        KUBE_SEP_B=dnat("10.0.0.2"),
    )
    assert found(ruleset)["10.0.0.2:80"] == 1.0
