"""Rules are rendered while iptables-restore reads them."""

import functools
from collections.abc import Iterator

import pytest

from pykubeproxy.objects import Family
from pykubeproxy.rules import plan
from pykubeproxy.rules.again import Again
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import Chain, Change, restore_input
from pykubeproxy.rules.programmed import Programmed
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import PortRules
from pykubeproxy.services.ports import PortName

SERVICES = 40
NOTHING = Ruleset(Family.IPV4, {})
LIVE = Ruleset(Family.IPV4, {ChainKey("nat", f"KUBE-SVC-{name}"): () for name in ("OLD", "0")})


class Compared(str):
    """A rule that counts how often such are compared, letter by letter."""

    __slots__ = ()
    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


class Rendered:
    """The rules of many service ports, and how many have been asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self.ports = {
            PortName("ns", f"s{n:02}", "http", "TCP"): PortRules(
                Again(functools.partial(self._chains, n)), ()
            )
            for n in range(SERVICES)
        }

    def _chains(self, n: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        self.asked += 1
        yield f"KUBE-SVC-{n}", (f"-j KUBE-SEP-{n}",)
        yield f"KUBE-SEP-{n}", ("-j ACCEPT",)


@pytest.mark.parametrize("chains_per_block", [None, 10])
def test_the_first_load_is_rendered_as_it_is_read(
    chains_per_block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes first can be read when hardly any service has been rendered, and each is rendered once."""
    monkeypatch.setattr(plan, "_LEGACY_DECLARED_TOGETHER", 10)
    rendered = Rendered()
    draft = Programmed(NOTHING).first_draft(rendered.ports, RuleOptions(Family.IPV4), (), NOTHING)
    early = {}
    for piece in restore_input(draft.change, chains_per_block):
        for line in piece.split("\n"):
            early.setdefault(line, rendered.asked)
    # Whether there will be more than one block has to be known before the first.
    assert early[":KUBE-SVC-0 - [0:0]"] <= 11
    assert early[":KUBE-SVC-39 - [0:0]"] == rendered.asked == SERVICES
    assert draft.tally.rules["nat"] >= 2 * SERVICES
    assert len(draft.ports) == SERVICES


@pytest.mark.parametrize("chains_per_block", [None, 10])
def test_read_again_it_is_the_same(chains_per_block: int | None) -> None:
    """So that a failure can be explained by the line that it names; and nothing is counted twice."""
    draft = Programmed(LIVE).first_draft(Rendered().ports, RuleOptions(Family.IPV4), (), LIVE)
    text = restore_input(draft.change, chains_per_block)
    first = "".join(text)
    chains = draft.tally.chains
    assert "".join(text) == first
    assert draft.tally.chains == chains
    assert "-X KUBE-SVC-OLD" in first
    assert "-X KUBE-SVC-0\n" not in first


def test_what_changes_in_a_long_shared_chain_is_found_in_one_pass() -> None:
    """Thousands of services without endpoints have a rule each in filter KUBE-SERVICES."""
    key, count = ChainKey("filter", "KUBE-SERVICES"), 300
    before, after = (
        tuple(Compared(f"-d 10.0.{n // 250}.{n % 250}/32 -j REJECT") for n in range(first, first + count))
        for first in (0, 1)
    )
    Compared.count = 0
    text = "".join(restore_input(Change(shared=(Chain(key, after),), before={key: before}), None))
    assert text.count("COMMIT") == 2
    assert Compared.count < 10 * count
