"""Walks take time in proportion to the rules, however chains jump to each other."""

import pytest

from pykubeproxy.inspect.dump.model import views
from pykubeproxy.inspect.limit import RuleLimit, TooManyRules
from pykubeproxy.inspect.meaning.fingerprints import Fingerprints, SharedNumbers
from pykubeproxy.inspect.packets.iptables import IptablesRules
from pykubeproxy.inspect.packets.packet import NodeNetwork, Packet
from pykubeproxy.objects import Family
from pykubeproxy.rules.iptables_save import parse
from pykubeproxy.rules.ruleset import Ruleset
from tests.traces import compare_meaning, trace_packet

HOST = NodeNetwork(frozenset({"192.168.0.1"}))
PACKET = Packet("tcp", "10.1.1.1", "10.96.0.1", 80)
SERVICE = (
    '-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "ns/a" -m tcp --dport 80 -j KUBE-SVC-0'
)


def doubled(chains: int, condition: str = "") -> Ruleset:
    """A Service whose chain jumps twice to the next one, which does the same; no packet finds its endpoint early."""
    jumps = "".join(f"-A KUBE-SVC-{it} {condition}-j KUBE-SVC-{it + 1}\n" * 2 for it in range(chains))
    names = "".join(f":KUBE-SVC-{it} - [0:0]\n" for it in range(chains + 1))
    last = f"-A KUBE-SVC-{chains} -p tcp -j MARK --set-xmark 0x1/0x1\n"
    text = "*nat\n:PREROUTING - [0:0]\n:KUBE-SERVICES - [0:0]\n{}-A PREROUTING -j KUBE-SERVICES\n{}\n{}{}COMMIT\n"
    return parse(Family.IPV4, text.format(names, SERVICE, jumps, last))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rules walks count."""
    found: list[int] = []
    count = RuleLimit.count

    def counting(limit: RuleLimit, rules: int) -> None:
        found.append(rules)
        count(limit, rules)

    monkeypatch.setattr(RuleLimit, "count", counting)
    return found


@pytest.mark.parametrize("condition", ["", "-m statistic --mode random --probability 0.5 "])
def test_a_trace_through_chains_that_double_ends(condition: str, counted: list[int]) -> None:
    with pytest.raises(TooManyRules):
        trace_packet(doubled(40, condition), PACKET, HOST)
    assert len(counted) < 1_000_000  # of 2^40


def test_the_shares_of_chains_that_double_end(counted: list[int]) -> None:
    with pytest.raises(TooManyRules):
        views(doubled(40), {})
    assert len(counted) < 1_000_000


def test_the_meaning_of_chains_that_double_ends(counted: list[int]) -> None:
    with pytest.raises(TooManyRules):
        compare_meaning(doubled(40), doubled(41), HOST)
    assert len(counted) < 1_000_000


def test_the_numbers_of_chains_that_repeat_another_one_take_little_memory() -> None:
    """Each has the rules of the chain below: with copies, a file of a megabyte takes three gigabytes."""
    many = "".join(f"-A KUBE-SERVICES -s 10.0.0.{it}/32 -j KUBE-C{it}\n" for it in range(200))
    chains = "".join(f":KUBE-C{it} - [0:0]\n" for it in range(200))
    each = "".join(
        f"-A KUBE-C{it} -s 10.1.0.{it}/32 -j MARK --set-xmark 0x1/0x1\n-A KUBE-C{it} -j KUBE-BIG\n"
        for it in range(200)
    )
    big = "".join(
        f"-A KUBE-BIG -s 10.2.{it // 250}.{it % 250}/32 -j MARK --set-xmark 0x2/0x2\n" for it in range(9000)
    )
    start = "*nat\n:PREROUTING - [0:0]\n:KUBE-SERVICES - [0:0]\n:KUBE-SVC-0 - [0:0]\n:KUBE-BIG - [0:0]\n"
    rest = (
        f"-A PREROUTING -j KUBE-SERVICES\n{SERVICE}\n{many}{each}{big}-A KUBE-SVC-0 -p tcp -j DROP\nCOMMIT\n"
    )
    hostile = IptablesRules(parse(Family.IPV4, f"{start}{chains}{rest}"))
    shared = SharedNumbers()
    numbers = Fingerprints(hostile, shared).of(PACKET)
    assert numbers
    assert len(shared.named(numbers).addresses) == 200 + 200 + 9000
    assert sum(len(it) for it in shared._numbers) < 12_000


def test_rules_met_for_the_first_time_raise_the_limit() -> None:
    """A large table has honest long walks."""
    limit = RuleLimit(1000, 10, 5)
    for chain in range(3):
        limit.enter(chain, 20)
    limit.count(250)
    with pytest.raises(TooManyRules):
        limit.count(1)
    most = RuleLimit(1000, 10, 5)
    most.enter("a", 500)
    with pytest.raises(TooManyRules):
        most.enter("a", 501)
