"""The iptables fake behaves like real iptables on random input."""

import random
from itertools import pairwise

import pytest

from pykubeproxy.kernel import Backend, Iptables, Rejected, Tables
from tests.fakes.iptables import FakeIptables

NAMES = ["AAA", "BBB", "CCC", "DDD"]
RULES = ["-j ACCEPT", "-j RETURN", "-s 10.0.0.1/32 -j RETURN", "-p udp -m udp --dport 53 -j ACCEPT"]


def block(rng: random.Random) -> str:
    """Return a block of some lines, most of them valid."""
    lines = [line(rng) for _ in range(rng.randint(1, 5))]
    return "*nat\n" + "\n".join(lines) + "\nCOMMIT\n"


def line(rng: random.Random) -> str:
    name, other = rng.choice(NAMES), rng.choice(NAMES)
    # Chains jump only to later ones: a loop would be rejected for another reason.
    jump = f"-j {other}" if other > name else "-j ACCEPT"
    rule = rng.choice([*RULES, jump, jump])
    forms = [
        f":{name} - [0:0]",
        f":{name} - [0:0]",
        f"-A {name} {rule}",
        f"-A {name} {rule}",
        f"-A OUTPUT {rule}",
        f"-I {name} {rng.randint(1, 3)} {rule}",
        f"-D {name} {rule}",
        f"-D {name} {rng.randint(1, 2)}",
        f"-F {name}",
        f"-X {name}",
        f"-N {name}",
    ]
    return rng.choice(forms)


def outcome(tables: Tables, text: str) -> tuple[object, ...]:
    try:
        tables.restore(text)
    except Rejected as refused:
        return refused.line_number, refused.line, refused.exit_code
    return ()


@pytest.mark.root
@pytest.mark.parametrize("seed", range(3))
def test_fake_and_real_iptables_agree(iptables: Iptables, seed: int) -> None:
    """They reject the same lines with the same exit codes, and the tables are equal."""
    rng = random.Random(seed)
    fake = FakeIptables(iptables.backend, iptables.family)
    start = "*nat\n" + "".join(f":{name} - [0:0]\n" for name in NAMES) + "COMMIT\n"
    taken = 0
    for text in [start, *(block(rng) for _ in range(60))]:
        if iptables.family.value == "IPv6":
            text = text.replace("10.0.0.1/32", "fd00::1/128")
        expected = outcome(iptables, text)
        assert outcome(fake, text) == expected, text
        assert fake.save() == iptables.save(), text
        taken += not expected
    assert 10 < taken < 55


@pytest.mark.root
@pytest.mark.parametrize("jumps", [15, 16])
def test_fake_and_real_iptables_reject_the_same_number_of_jumps(iptables: Iptables, jumps: int) -> None:
    """nftables accepts at most 15 in a row; legacy has no limit."""
    chains = [f"C{n}" for n in range(1, jumps + 1)]
    lines = [*(f":{name} - [0:0]" for name in chains), f"-A OUTPUT -j {chains[0]}"]
    lines += [f"-A {name} -j {to}" for name, to in pairwise(chains)]
    text = "*nat\n" + "\n".join(lines) + "\nCOMMIT\n"
    expected = outcome(iptables, text)
    assert outcome(FakeIptables(iptables.backend, iptables.family), text) == expected
    assert bool(expected) == (jumps > 15 and iptables.backend is Backend.NFT)
