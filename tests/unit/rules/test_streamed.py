"""Rules are rendered while iptables-restore reads them."""

import functools
from collections.abc import Iterator

import pytest

from pykubeproxy.objects import Family
from pykubeproxy.rules.again import Again
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import restore_input
from pykubeproxy.rules.programmed import Programmed
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import PortRules
from pykubeproxy.services.ports import PortName

SERVICES = 40
NOTHING = Ruleset(Family.IPV4, {})
LIVE = Ruleset(Family.IPV4, {ChainKey("nat", f"KUBE-SVC-{name}"): () for name in ("OLD", "0")})


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
def test_the_first_load_is_rendered_as_it_is_read(chains_per_block: int | None) -> None:
    """What comes first can be read when hardly any service has been rendered, and each is rendered once."""
    rendered = Rendered()
    draft = Programmed(NOTHING).first_draft(rendered.ports, RuleOptions(Family.IPV4), (), NOTHING)
    early = {}
    for piece in restore_input(draft.change, chains_per_block):
        for line in piece.split("\n"):
            early.setdefault(line, rendered.asked)
    # Whether there will be more than one block has to be known before the first.
    assert early[":KUBE-SVC-0 - [0:0]"] <= (1 if chains_per_block is None else 11)
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
