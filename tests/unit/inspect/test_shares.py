"""Shares of endpoints: probabilities in rules, multiplied along the path."""

import pytest

from pykubeproxy.inspect.routes import affinity_seconds, shares
from pykubeproxy.objects import Family
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


@pytest.mark.parametrize("text", ["x", "nan", "-0.5", "1.5", "9" * 5000])
def test_an_unreadable_probability_takes_no_packets(text: str) -> None:
    """iptables writes none, but a file may have one."""
    ruleset = chains(
        KUBE_SVC_X=[f"-m statistic --mode random --probability {text} -j KUBE-SEP-A", "-j KUBE-SEP-B"],
        KUBE_SEP_A=dnat("10.0.0.1"),
        KUBE_SEP_B=dnat("10.0.0.2"),
    )
    assert found(ruleset)["10.0.0.2:80"] == 1.0
