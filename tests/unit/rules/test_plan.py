"""Chunks of restore input: rendered one by one, the same each time, and in few passes."""

import itertools
import re
from collections.abc import Iterable, Iterator

import pytest

from pykubeproxy.objects import Family, Key
from pykubeproxy.rules import plan
from pykubeproxy.rules.known import TABLES, ChainsDeleted, Fact, KnownTables, PortsWritten
from pykubeproxy.rules.names import cluster_chain
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.plan import Chunk, DesiredPort, DesiredService, Plan, PlanLimits
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import PortRules
from pykubeproxy.rules.skeleton import NAT_SERVICES, SHARED
from pykubeproxy.services.ports import PortName

SERVICES = 40
OPTIONS = RuleOptions(Family.IPV4)
LIVE = Ruleset(Family.IPV4, {ChainKey("nat", f"KUBE-SVC-{name}"): () for name in ("OLD", "0")})

# What the rules below lead to, without the first Service.
UNCHANGED = Ruleset(
    Family.IPV4,
    {
        **{ChainKey("nat", f"KUBE-SVC-{n}"): (f"-j KUBE-SEP-{n}",) for n in range(1, SERVICES)},
        **{ChainKey("nat", f"KUBE-SEP-{n}"): ("-j ACCEPT",) for n in range(1, SERVICES)},
    },
)


class Compared(str):
    """A rule that counts comparisons letter by letter."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Compared.comparisons += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def tables(live: Ruleset | None = None) -> KnownTables:
    """Return known tables, empty ones by default."""
    known = KnownTables()
    known.observe(live if live is not None else Ruleset(Family.IPV4, {}), TABLES)
    return known


class Rendered:
    """The rules of many service ports; counts how many were rendered."""

    def __init__(self) -> None:
        self.count = 0

    def services(self) -> Iterator[DesiredService]:
        for n in range(SERVICES):
            name = PortName("ns", f"s{n:02}", "http", "TCP")
            port = DesiredPort(name, _Rules(self, n), 1)  # type: ignore[arg-type]
            yield DesiredService(Key("ns", name.service), (port,))

    def plan(self, chains_per_block: int | None, known: KnownTables | None = None) -> Plan:
        return Plan(
            known or tables(), self.services(), OPTIONS, (), PlanLimits(chains_per_block), frozenset(SHARED)
        )


def removal(known: KnownTables, chains_per_block: int) -> list[Chunk]:
    """Return the chunks that remove all Services."""
    gone = [DesiredService(key, ()) for key in known.services()]
    return [*Plan(known, gone, OPTIONS, (), PlanLimits(chains_per_block))]


def facts_of(chunks: Iterable[Chunk]) -> list[Fact]:
    return [fact for chunk in chunks for fact in chunk.facts]


def deleted_by(chunks: Iterable[Chunk]) -> list[list[str]]:
    """Return the chains that each chunk deletes."""
    found = (
        [key.chain for fact in chunk.facts if isinstance(fact, ChainsDeleted) for key in fact.chains]
        for chunk in chunks
    )
    return [names for names in found if names]


class _Rules:
    entries = ()

    def __init__(self, counter: Rendered, n: int) -> None:
        self._counter, self._n = counter, n

    def chains(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        self._counter.count += 1
        yield f"KUBE-SVC-{self._n}", (f"-j KUBE-SEP-{self._n}",)
        yield f"KUBE-SEP-{self._n}", ("-j ACCEPT",)


class _Groups:
    entries = ()

    def __init__(self, root: str) -> None:
        self._root = root

    def chains(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield self._root, ("-j KUBE-SVC-GROUP", "-j KUBE-SVC-LATER")
        yield "KUBE-SVC-LATER", ("-j KUBE-SEP-NEW",) * 3
        yield "KUBE-SVC-GROUP", ("-j KUBE-SEP-OLD",)
        yield "KUBE-SEP-NEW", ("-j ACCEPT",)
        yield "KUBE-SEP-OLD", ("-j ACCEPT",)


@pytest.mark.parametrize("chains_per_block", [None, 10])
def test_services_are_rendered_while_the_first_are_written(
    chains_per_block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk exists when hardly any service was rendered, and each is rendered once."""
    monkeypatch.setattr(plan, "_LEGACY_DECLARED_TOGETHER", 10)
    rendered = Rendered()
    first_seen: dict[str, int] = {}
    rules = ports = 0
    for chunk in rendered.plan(chains_per_block):
        rules += sum(len(chain.rules) for chain in chunk.chains if chain.key.table == "nat")
        ports += sum(len(fact.ports) for fact in chunk.facts if isinstance(fact, PortsWritten))
        for line in chunk.text.split("\n"):
            first_seen.setdefault(line, rendered.count)
    # Two batches must be known before the first is written, to tell whether one block is enough.
    assert first_seen[":KUBE-SVC-0 - [0:0]"] <= 11
    assert first_seen[":KUBE-SVC-39 - [0:0]"] == rendered.count == SERVICES
    assert rules >= 2 * SERVICES
    assert ports == SERVICES


@pytest.mark.parametrize("chains_per_block", [None, 10])
def test_a_chain_that_is_still_used_is_not_deleted(chains_per_block: int | None) -> None:
    chunks = [*Rendered().plan(chains_per_block, tables(LIVE))]
    text = "".join(chunk.text for chunk in chunks)
    assert "-X KUBE-SVC-OLD" in text
    assert "-X KUBE-SVC-0\n" not in text
    assert deleted_by(chunks) == [["KUBE-SVC-OLD"]]


def test_an_unchanged_service_after_a_large_one_needs_no_further_block() -> None:
    """It has more chains than a block should have: those that others jump to go first."""
    chunks = Rendered().plan(1, tables(UNCHANGED))
    nat = [chunk.text for chunk in chunks if re.search(":KUBE-(SEP|SVC)", chunk.text)]
    assert [(text.count(":KUBE-SEP-0 "), text.count(":KUBE-SVC-0 ")) for text in nat] == [(1, 0), (0, 1)]


def test_every_chunk_is_a_whole_block() -> None:
    """If blocks are limited: the kernel may reject any line of a block at its end, and the session must know it then."""
    texts = [chunk.text for n in (3, 200) for chunk in Rendered().plan(n, tables(LIVE)) if chunk.text]
    assert all(
        text.startswith("*") and text.endswith("COMMIT\n") and text.count("COMMIT") == 1 for text in texts
    )


@pytest.mark.parametrize("chains_per_block", [None, 3, 200])
def test_an_unused_chain_is_emptied_and_deleted_in_one_block(chains_per_block: int | None) -> None:
    """If another proxy refers to it by now, the kernel rejects the block; emptied before, it would lose packets."""
    unused = [f"KUBE-{kind}-OLD{n}" for kind in ("SVC", "EXT", "SEP") for n in range(5)]
    live = Ruleset(Family.IPV4, {ChainKey("nat", name): ("-j ACCEPT",) for name in unused})
    text = "".join(chunk.text for chunk in Rendered().plan(chains_per_block, tables(live)))
    changed = [
        (set(re.findall(r":(\S+-OLD\d)", block)), set(re.findall(r"-X (\S+-OLD\d)", block)))
        for block in text.split("COMMIT\n")
    ]
    assert set().union(*(deleted for _, deleted in changed)) == set(unused)
    assert all(emptied == deleted for emptied, deleted in changed)


def test_chains_of_services_are_deleted_in_small_blocks() -> None:
    """Each before those it jumps to: the time of a block grows with the square of its chains."""
    known = tables()
    known.commit(facts_of(Rendered().plan(10, known)))
    deleted = [re.findall(r"-X (\S+)", chunk.text) for chunk in removal(known, 10)]
    assert max(map(len, deleted)) == 10
    order = [name for names in deleted for name in names]
    assert len(order) == 2 * SERVICES
    assert all(order.index(f"KUBE-SVC-{n}") < order.index(f"KUBE-SEP-{n}") for n in range(SERVICES))


def test_unused_chains_of_live_tables_are_deleted_in_small_blocks() -> None:
    """Each before those it jumps to, whatever others have added; only chains in a circle are deleted together."""
    live = {
        **{ChainKey("nat", f"KUBE-EXT-OLD{n}"): (f"-j KUBE-SVC-OLD{n}",) for n in range(20)},
        **{ChainKey("nat", f"KUBE-SVC-OLD{n}"): (f"-j KUBE-SEP-OLD{n}",) for n in range(20)},
        **{ChainKey("nat", f"KUBE-SEP-OLD{n}"): ("-j ACCEPT",) for n in range(20)},
        ChainKey("nat", "KUBE-SVC-OLD0"): ("-j KUBE-EXT-OLD19",),
    }
    deleted = deleted_by(Rendered().plan(10, tables(Ruleset(Family.IPV4, live))))
    assert max(map(len, deleted)) == 10
    order = [name for names in deleted for name in names]
    assert sorted(order) == sorted(key.chain for key in live)
    for key, rules in live.items():
        assert all(order.index(key.chain) < order.index(rule[3:]) for rule in rules if "OLD" in rule)
    circle = live | {ChainKey("nat", "KUBE-SVC-OLD19"): ("-j KUBE-SVC-OLD0",)}
    deleted = deleted_by(Rendered().plan(10, tables(Ruleset(Family.IPV4, circle))))
    assert max(map(len, deleted)) == 40


def test_a_large_table_gets_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block takes a time that grows with the table; many rules in one block take longer, too."""
    monkeypatch.setattr(plan, "_TABLE_PER_BLOCK", 2)
    known = tables()
    known.commit(facts_of(Rendered().plan(10, known)))
    most = max(map(len, deleted_by(removal(known, 10))))
    assert 30 <= most < 2 * SERVICES
    monkeypatch.setattr(plan, "_MOST_RULES", 6)
    written = [chunk for chunk in Rendered().plan(100) if ":KUBE-SVC-" in chunk.text]
    assert max(sum(chain.key.chain[:8] == "KUBE-SVC" for chain in chunk.chains) for chunk in written) == 3


def test_blocks_grow_while_a_table_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chains that the same update has written count like those that were there before."""
    monkeypatch.setattr(plan, "_TABLE_PER_BLOCK", 2)
    chunks = Rendered().plan(10)
    own = ("KUBE-SVC-", "KUBE-SEP-")
    written = [sum(chain.key.chain.startswith(own) for chain in chunk.chains) for chunk in chunks]
    written = [number for number in written if number > 1]
    assert written[0] == 10
    assert written[:-1] == sorted(written[:-1])
    assert max(written) > 20


@pytest.mark.parametrize("portion", [2, None])
def test_a_port_in_pieces_keeps_the_unused_chains_that_its_groups_need(portion: int | None) -> None:
    """Else the block that deletes unused chains fails, for the group refers to one of them."""
    known = tables(Ruleset(Family.IPV4, {ChainKey("nat", "KUBE-SEP-OLD"): ("-j ACCEPT",)}))
    name = PortName("ns", "large", "http", "TCP")
    port = DesiredPort(name, _Groups(cluster_chain(name)), 2)  # type: ignore[arg-type]
    made = Plan(
        known, [DesiredService(name.service_key, (port,))], OPTIONS, (), PlanLimits(2, portion=portion)
    )
    chunks = list(itertools.takewhile(lambda chunk: ":KUBE-SVC-LATER" not in chunk.text, made))
    text = "".join(chunk.text for chunk in chunks)
    assert "-A KUBE-SVC-GROUP -j KUBE-SEP-OLD" in text
    assert "-X KUBE-SEP-OLD" not in text
    # The rest of the plan fails.
    known.commit(facts_of(chunks))
    assert not known.unused()
    (held,) = known.ports(name.service_key)
    assert held.existing_chains() == {"KUBE-SVC-GROUP", "KUBE-SEP-NEW", "KUBE-SEP-OLD"}


def test_changes_of_a_long_shared_chain_are_found_in_one_pass() -> None:
    """Thousands of services without endpoints have a rule each in filter KUBE-SERVICES."""
    key, count = ChainKey("filter", "KUBE-SERVICES"), 300
    before, after = (
        tuple(Compared(f"-d 10.0.{n // 250}.{n % 250}/32 -j REJECT") for n in range(first, first + count))
        for first in (0, 1)
    )
    known = tables(Ruleset(Family.IPV4, {key: before, NAT_SERVICES: ("-j KUBE-NODEPORTS",)}))
    service = Key("ns", "s")
    port = DesiredPort(PortName(*service, "", "TCP"), PortRules(((key, after),)), 0)
    made = Plan(known, [DesiredService(service, (port,))], OPTIONS, (), PlanLimits(None))
    Compared.comparisons = 0
    text = "".join(chunk.text for chunk in made)
    assert text.count("*filter") == 2
    assert Compared.comparisons < 12 * count
