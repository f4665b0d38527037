"""Chunks of restore input: rendered one by one, the same each time, and in few passes."""

import re
from collections.abc import Iterator

import pytest

from pykubeproxy.objects import Family, Key
from pykubeproxy.rules import blocks
from pykubeproxy.rules.applied import AppliedState, Update
from pykubeproxy.rules.blocks import Blocks
from pykubeproxy.rules.digests import Desired, DesiredPort
from pykubeproxy.rules.dispatch import SharedEntries, Tree
from pykubeproxy.rules.names import cluster_chain
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.skeleton import SHARED
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


class Rendered:
    """The rules of many service ports; counts how many were rendered."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, live: Ruleset | None = None) -> Update:
        applied = AppliedState()
        if live is not None:
            applied.adopt(live)
        services = {}
        for n in range(SERVICES):
            name = PortName("ns", f"s{n:02}", "http", "TCP")
            services[Key("ns", name.service)] = (DesiredPort(name, _Rules(self, n), 1),)  # type: ignore[arg-type]
        return applied.update_to(Desired(services, OPTIONS, (), frozenset(SHARED)))


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
    monkeypatch.setattr(blocks, "_LEGACY_DECLARED_TOGETHER", 10)
    rendered = Rendered()
    first_seen: dict[str, int] = {}
    rules = ports = 0
    for chunk in Blocks(rendered.update(), chains_per_block):
        rules += sum(len(chain.rules) for chain in chunk.chains if chain.key.table == "nat")
        ports += len(chunk.ports)
        for line in chunk.text.split("\n"):
            first_seen.setdefault(line, rendered.count)
    # Two batches must be known before the first is written, to tell whether one block is enough.
    assert first_seen[":KUBE-SVC-0 - [0:0]"] <= 11
    assert first_seen[":KUBE-SVC-39 - [0:0]"] == rendered.count == SERVICES
    assert rules >= 2 * SERVICES
    assert ports == SERVICES


@pytest.mark.parametrize("chains_per_block", [None, 10])
def test_reading_chunks_has_no_side_effect(chains_per_block: int | None) -> None:
    """Read twice, they are the same: chains to delete, ports and all."""
    update = Rendered().update(LIVE)
    first = list(Blocks(update, chains_per_block))
    assert list(Blocks(update, chains_per_block)) == first
    text = "".join(chunk.text for chunk in first)
    assert "-X KUBE-SVC-OLD" in text
    assert "-X KUBE-SVC-0\n" not in text
    assert [key.chain for chunk in first for key in chunk.deleted] == ["KUBE-SVC-OLD"]


def test_an_unchanged_service_after_a_large_one_needs_no_further_block() -> None:
    """It has more chains than a block should have: those that others jump to go first."""
    update = Rendered().update(UNCHANGED)
    nat = [chunk.text for chunk in Blocks(update, 1) if re.search(":KUBE-(SEP|SVC)", chunk.text)]
    assert [(text.count(":KUBE-SEP-0 "), text.count(":KUBE-SVC-0 ")) for text in nat] == [(1, 0), (0, 1)]


def test_every_chunk_is_a_whole_block() -> None:
    """If blocks are limited: the kernel may reject any line of a block at its end, and the session must know it then."""
    texts = [chunk.text for n in (3, 200) for chunk in Blocks(Rendered().update(LIVE), n) if chunk.text]
    assert all(
        text.startswith("*") and text.endswith("COMMIT\n") and text.count("COMMIT") == 1 for text in texts
    )


@pytest.mark.parametrize("chains_per_block", [None, 3, 200])
def test_an_unused_chain_is_emptied_and_deleted_in_one_block(chains_per_block: int | None) -> None:
    """If another proxy refers to it by now, the kernel rejects the block; emptied before, it would lose packets."""
    unused = [f"KUBE-{kind}-OLD{n}" for kind in ("SVC", "EXT", "SEP") for n in range(5)]
    live = Ruleset(Family.IPV4, {ChainKey("nat", name): ("-j ACCEPT",) for name in unused})
    text = "".join(chunk.text for chunk in Blocks(Rendered().update(live), chains_per_block))
    changed = [
        (set(re.findall(r":(\S+-OLD\d)", block)), set(re.findall(r"-X (\S+-OLD\d)", block)))
        for block in text.split("COMMIT\n")
    ]
    assert set().union(*(deleted for _, deleted in changed)) == set(unused)
    assert all(emptied == deleted for emptied, deleted in changed)


def test_chains_of_services_are_deleted_in_small_blocks() -> None:
    """Each before those it jumps to: the time of a block grows with the square of its chains."""
    update = Rendered().update()
    ports = [port for chunk in Blocks(update, 10) for port in chunk.ports]
    applied = update.applied.after(update, ports, ())
    gone = applied.update_to(Desired(dict.fromkeys(applied.services(), ()), OPTIONS, ()))
    deleted = [re.findall(r"-X (\S+)", chunk.text) for chunk in Blocks(gone, 10)]
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
    update = Rendered().update(Ruleset(Family.IPV4, live))
    deleted = [chunk.deleted for chunk in Blocks(update, 10) if chunk.deleted]
    assert max(map(len, deleted)) == 10
    order = [key.chain for keys in deleted for key in keys]
    assert sorted(order) == sorted(key.chain for key in live)
    for key, rules in live.items():
        assert all(order.index(key.chain) < order.index(rule[3:]) for rule in rules if "OLD" in rule)
    circle = live | {ChainKey("nat", "KUBE-SVC-OLD19"): ("-j KUBE-SVC-OLD0",)}
    deleted = [chunk.deleted for chunk in Blocks(Rendered().update(Ruleset(Family.IPV4, circle)), 10)]
    assert max(map(len, deleted)) == 40


def test_a_large_table_gets_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block takes a time that grows with the table; many rules in one block take longer, too."""
    monkeypatch.setattr(blocks, "_TABLE_PER_BLOCK", 2)
    update = Rendered().update()
    ports = [port for chunk in Blocks(update, 10) for port in chunk.ports]
    applied = update.applied.after(update, ports, ())
    gone = applied.update_to(Desired(dict.fromkeys(applied.services(), ()), OPTIONS, ()))
    most = max(len(chunk.deleted) for chunk in Blocks(gone, 10))
    assert 30 <= most < 2 * SERVICES
    monkeypatch.setattr(blocks, "_MOST_RULES", 6)
    batches = list(blocks.batches(Rendered().update().chains(), lambda _: 100))
    assert max(sum(len(chain.rules) for chain in batch.chains) for batch in batches) == 6


def test_blocks_grow_while_a_table_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chains that the same update has written count like those that were there before."""
    monkeypatch.setattr(blocks, "_TABLE_PER_BLOCK", 2)
    written = [len(chunk.chains) for chunk in Blocks(Rendered().update(), 10) if chunk.ports]
    assert written[0] == 10
    assert written[:-1] == sorted(written[:-1])
    assert max(written) > 20


def test_a_port_in_portions_keeps_the_unused_chains_that_its_groups_need() -> None:
    """Else the block that deletes unused chains fails, for the group refers to one of them."""
    applied = AppliedState()
    applied.adopt(Ruleset(Family.IPV4, {ChainKey("nat", "KUBE-SEP-OLD"): ("-j ACCEPT",)}))
    name = PortName("ns", "large", "http", "TCP")
    port = DesiredPort(name, _Groups(cluster_chain(name)), 2)  # type: ignore[arg-type]
    part = applied.growing(port, 2)
    assert part
    assert [chain.key.chain for chain in part.chains] == ["KUBE-SVC-GROUP", "KUBE-SEP-NEW"]
    update = applied.update_to(Desired({name.service_key: (part,)}, OPTIONS, ()))
    text = "".join(chunk.text for chunk in Blocks(update, 10))
    assert "-A KUBE-SVC-GROUP -j KUBE-SEP-OLD" in text
    assert "-X KUBE-SEP-OLD" not in text


def test_changes_of_a_long_shared_chain_are_found_in_one_pass() -> None:
    """Thousands of services without endpoints have a rule each in filter KUBE-SERVICES."""
    key, count = ChainKey("filter", "KUBE-SERVICES"), 300
    before, after = (
        tuple(Compared(f"-d 10.0.{n // 250}.{n % 250}/32 -j REJECT") for n in range(first, first + count))
        for first in (0, 1)
    )
    applied = AppliedState()
    applied.adopt(Ruleset(Family.IPV4, {key: before}))
    entries = SharedEntries(key).replacing({Key("ns", "s"): after})
    update = Update(
        applied=applied,
        desired=Desired({}, OPTIONS, ()),
        fixed=(),
        shared=(),
        entries={key: entries},
        trees={key: Tree(after, ())},
    )
    Compared.comparisons = 0
    text = "".join(chunk.text for chunk in Blocks(update, None))
    assert text.count("COMMIT") == 2
    assert Compared.comparisons < 10 * count
