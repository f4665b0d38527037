"""Differences between two Rulesets in the proxy's own chains."""

from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.difference import ChainDifference, difference, own_part
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Ruleset

PREROUTING = ChainKey("nat", "PREROUTING")
JUMP = skeleton.JUMPS[PREROUTING][0]
OPTIONS = RuleOptions(Family.IPV4)
WANTED = {
    **skeleton.JUMPS,
    skeleton.KUBELET_FIREWALL: skeleton.kubelet_firewall(OPTIONS),
    **skeleton.fixed_chains(OPTIONS),
}


def ruleset(chains: dict[ChainKey, tuple[str, ...]]) -> Ruleset:
    return Ruleset(Family.IPV4, chains)


def drift(live: dict[ChainKey, tuple[str, ...]]) -> tuple[ChainDifference, ...]:
    return difference(own_part(ruleset(live), ruleset(WANTED)), ruleset(WANTED))


def nat(chain: str) -> ChainKey:
    return ChainKey("nat", chain)


def test_equal_tables() -> None:
    """Equal tables do not differ, in any order of chains."""
    assert drift(WANTED) == ()
    assert drift(dict(reversed(WANTED.items()))) == ()


def test_foreign_rules_are_ignored() -> None:
    """Foreign chains, tables and rules beside our jumps are no difference."""
    live = {
        **WANTED,
        PREROUTING: ("-j DOCKER", JUMP, "-j LAST"),
        skeleton.KUBELET_FIREWALL: ("-j DROP", *WANTED[skeleton.KUBELET_FIREWALL]),
        ChainKey("filter", "DOCKER"): ("-j RETURN",),
        ChainKey("filter", "KUBE-KUBELET-CANARY"): (),
        ChainKey("raw", "PREROUTING"): ("-j ACCEPT",),
    }
    assert drift(live) == ()


def test_missing_jumps() -> None:
    """A missing jump is a difference; in a missing table, built-in chains are not."""
    assert drift({**WANTED, PREROUTING: ()}) == (ChainDifference(PREROUTING, (), (JUMP,)),)
    live = {key: rules for key, rules in WANTED.items() if key.table != "nat"}
    found = {it.key: it for it in drift(live)}
    assert found[PREROUTING].before == ()
    assert found[nat("KUBE-MARK-MASQ")].before is None
    assert {key.table for key in found} == {"nat"}


def test_missing_rule_in_kubelet_chain() -> None:
    """Our rule in KUBE-FIREWALL may be missing, or the whole chain."""
    (found,) = drift({**WANTED, skeleton.KUBELET_FIREWALL: ("-j DROP",)})
    assert (found.gone, found.new) == ((), WANTED[skeleton.KUBELET_FIREWALL])
    (found,) = drift({key: rules for key, rules in WANTED.items() if key != skeleton.KUBELET_FIREWALL})
    assert found.before is None


def test_stale_chains() -> None:
    """Undesired chains of ours are gone; one that foreign rules refer to can only be emptied."""
    stale, held, empty = nat("KUBE-SVC-A"), nat("KUBE-SVC-B"), nat("KUBE-SVC-C")
    live = {
        **WANTED,
        stale: (),
        held: ("-j ACCEPT",),
        empty: (),
        nat("OTHERS"): ("-j KUBE-SVC-B", "-j KUBE-SVC-C"),
    }
    assert [(it.key, it.before, it.after) for it in drift(live)] == [
        (stale, (), None),
        (held, ("-j ACCEPT",), None),
    ]


def test_order() -> None:
    """Chains are in the desired order; rules in another order differ with none gone and none new."""
    one, two = nat("KUBE-SVC-A"), nat("KUBE-SVC-B")
    before = ruleset({one: ("-j A", "-j B"), two: ("-j C",)})
    found = difference(before, ruleset({two: ("-j D",), one: ("-j B", "-j A")}))
    assert [it.key for it in found] == [two, one]
    assert [(it.gone, it.new) for it in found] == [(("-j C",), ("-j D",)), ((), ())]


def test_comments_in_chains_of_services_are_no_difference() -> None:
    """A large cluster omits some of them; what else differs is shown with the comment that is desired."""
    chain, shared = nat("KUBE-SEP-A"), skeleton.NAT_SERVICES
    rules = ("-s 10.0.0.1/32 -j KUBE-MARK-MASQ", "-p tcp -m tcp -j DNAT --to-destination 10.0.0.1:80")
    commented = tuple(rule.replace(" -", ' -m comment --comment "ns/web:http" -', 1) for rule in rules)
    assert difference(ruleset({chain: commented}), ruleset({chain: rules})) == ()
    (found,) = difference(ruleset({chain: (*rules, "-j LOG")}), ruleset({chain: commented}))
    assert (found.gone, found.new) == (("-j LOG",), ())
    assert difference(ruleset({shared: commented}), ruleset({shared: rules}))
