"""Divide an update into the blocks of iptables-restore, in an order that interrupts no service.

`Blocks` is a value: it yields the chunks of the input, rendered one by one, with the chains that each writes and deletes.
First, filter gains the rules that reject or drop, and keeps its old ones. Then nat gets own chains, and its shared chains
switch over to them. Then unused chains are deleted, and last, filter loses the rules that no longer hold.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from pykubeproxy.rules.applied import ChainUpdate, Update
from pykubeproxy.rules.digests import AppliedChain, AppliedPort
from pykubeproxy.rules.dispatch import Tree
from pykubeproxy.rules.ruleset import ChainKey, Rules
from pykubeproxy.rules.text import Chain, block, delete_chains, empty_chains, join, write_chains

# iptables-nft takes some milliseconds for a block, and a time that grows with the square of its chains. Measured with
# 1000 services: 0.46 s at 50, 0.36 s at 200, 0.53 s at 1000.
NFT_CHAINS_PER_BLOCK = 200
# For each block the kernel also walks all chains of the table. So a block may have one chain for each _TABLE_PER_BLOCK
# chains in the table, up to _MOST_CHAINS. 255,000 new chains take 85 s at 200, 26 s with this.
# Creating 5100 chains beside 41,000 takes 1.86 s at 200, 0.82 s at 1000.
_TABLE_PER_BLOCK, _MOST_CHAINS = 40, 2000
# Writing existing chains again takes a time that grows with the square of their rules: 200 chains of 49 rules take 1.66 s
# in one block, 0.82 s in two.
_MOST_RULES = 6000
# iptables-legacy-restore inserts each new chain into a sorted list. With 5000 services it takes a quarter less time when
# this many chains are declared together, the last by name first.
_LEGACY_DECLARED_TOGETHER = 2000

_T = TypeVar("_T")


class Chunk(NamedTuple):
    """A piece of restore input that never goes beyond the end of a block, and what it does.

    `chains` are the written chains with their final rules, `deleted` the deleted ones. `ports` are service ports
    whose chains are all written by the end of the block.
    """

    text: str
    chains: tuple[Chain, ...] = ()
    deleted: tuple[ChainKey, ...] = ()
    ports: tuple[AppliedPort, ...] = ()


class Blocks(msgspec.Struct, frozen=True):
    """The restore input of an update: chunks, rendered while they are read, the same at each iteration.

    A block names at most about `chains_per_block` chains, more if the table has many: the time of iptables-nft grows with
    the square of their number (1.8.9 to 1.8.13). None means one block for each table, since iptables-legacy replaces the
    whole table for each block. The chains of one service port share a block if they fit; else those that others jump to
    go first. The chunks have no text if nothing changes.
    """

    update: Update
    chains_per_block: int | None

    def __iter__(self) -> Iterator[Chunk]:
        update, limit = self.update, self.chains_per_block
        early, late = _filter_steps(update, limit or _LEGACY_DECLARED_TOGETHER)
        yield _block("mangle", _written(_of_table("mangle", update.fixed)))
        yield from _blocks("filter", early, limit)
        yield from _nat_blocks(update, limit)
        yield from _blocks("filter", late, limit)


def _of_table(table: str, chains: Iterable[Chain]) -> list[Chain]:
    return [chain for chain in chains if chain.key.table == table]


def _filter_steps(update: Update, limit: int) -> tuple[list[Chunk], list[Chunk]]:
    """Return the steps of table filter before nat changes, and those afterwards.

    If entries both come and go, the first steps write a tree with all of them. The others write the desired tree, and
    delete the branches that it lacks. A branch goes before those that jump to it, and two trees have a branch of one name
    only for the same packets. So after each step a packet meets every entry that it met before and shall meet.
    """
    before = _of_table("filter", update.fixed)
    after: list[Chain] = []
    desired = dict(before)
    unused: dict[ChainKey, None] = {}
    for root, entries in update.entries.items():
        if root.table != "filter":
            continue
        final = _chains(root, update.trees[root])
        applied = update.applied.filter_entries(root)
        lost = entries.lost(applied)
        both = {} if lost else dict(final)
        if lost and applied.lost(entries):
            dispatch = update.desired.options.dispatch
            both = dict(_chains(root, entries.with_lost(lost).arranged((), dispatch)))
        before += filter(update.applied.differs, map(Chain._make, both.items()))
        after += [
            chain
            for chain in final
            if (both[chain.key] != chain.rules if chain.key in both else update.applied.differs(chain))
        ]
        desired.update(final)
        unused.update(dict.fromkeys((*update.applied.branches(root), *both)))
    early = [Chunk(write_chains(some), _final(some, desired)) for some in _portions(tuple(before), limit)]
    lines = Chunk(join(update.desired.ensured.get("filter", ())))
    early[-1:] = [_joined((*early[-1:], lines))]
    late = [_written(some) for some in _portions(tuple(after), limit)]
    gone = tuple(key for key in unused if key not in desired)
    late += _deleted_branches(update, gone, limit)
    return early, [_joined(late)] if max(len(after), len(gone)) <= limit else late


def _deleted_branches(update: Update, gone: tuple[ChainKey, ...], limit: int) -> Iterator[Chunk]:
    """Yield the steps that delete branches: all are emptied first, since they refer to one another."""
    kept = {key for key in gone if update.applied.can_only_be_emptied(key)}
    emptied = tuple(key for key in gone if key not in kept or update.applied.differs(Chain(key, ())))
    for keys in _portions(emptied, limit):
        yield Chunk(
            empty_chains(key.chain for key in keys),
            tuple(Chain(key, ()) for key in keys if key in kept),
        )
    for keys in _portions(tuple(key for key in gone if key not in kept), limit):
        yield Chunk(delete_chains(key.chain for key in keys), deleted=keys)


def _final(chains: Iterable[Chain], desired: Mapping[ChainKey, Rules]) -> tuple[Chain, ...]:
    return tuple(chain for chain in chains if desired.get(chain.key) == chain.rules)


def _chains(root: ChainKey, tree: Tree) -> list[Chain]:
    """Return the chains of a tree, each after those it jumps to."""
    branches = (Chain(ChainKey(root.table, name), rules) for name, rules in tree.chains)
    return [*branches, Chain(root, tree.root)]


def _nat_blocks(update: Update, chains_per_block: int | None) -> Iterator[Chunk]:
    """Yield what changes in table nat: as one block if that is small, or if there is no limit."""
    before = update.applied.chain_count()

    def most(written: int) -> int:
        if chains_per_block is None:
            return _LEGACY_DECLARED_TOGETHER
        return most_chains(chains_per_block, before + written)

    limit = most(0)
    batched = batches(update.chains(), most)
    first = list(itertools.islice(batched, 2))
    replaced = update.replaced_chains()
    is_small = len(first) <= 1 and len(_unused(replaced, _names(first))) <= limit
    steps = _nat_steps(update, itertools.chain(first, batched), replaced, limit)
    if chains_per_block and is_small:
        # A chunk is a whole block: iptables-nft finds out at COMMIT which line the kernel rejects.
        steps = iter([_joined(tuple(steps))])
    yield from _blocks("nat", steps, chains_per_block)


def _nat_steps(
    update: Update, batched: Iterable[ChainUpdate], replaced: Mapping[str, AppliedChain], limit: int
) -> Iterator[Chunk]:
    """Yield the steps of table nat, without the lines that begin and end a block."""
    yield _written(_of_table("nat", update.fixed))
    written, used = 0, set[str]()
    for batch in batched:
        if replaced:
            used.update(_names([batch]))
        written += len(batch.chains)
        yield Chunk(write_chains(batch.chains), batch.chains, ports=batch.ports)
    shared = _written(_of_table("nat", update.shared))
    yield shared._replace(text=shared.text + join(update.desired.ensured.get("nat", ())))
    yield from _removed(update, _unused(replaced, used), limit, written)


def _removed(update: Update, unused: Mapping[str, AppliedChain], limit: int, written: int) -> Iterator[Chunk]:
    """Yield the steps that delete unused chains: as many as the update may, or as it has written: they must not pile up.

    A chain is emptied and deleted in one block: if another proxy refers to it by now, the kernel rejects the block, and
    the chain keeps its rules. Only chains that foreign rules refer to are emptied and stay.
    """
    empty = hash(())
    kept = {name for name in unused if update.applied.can_only_be_emptied(ChainKey("nat", name))}
    emptied = tuple(name for name in sorted(kept) if unused[name].digest != empty)
    for names in _portions(emptied, limit):
        yield Chunk(
            empty_chains(names),
            tuple(Chain(ChainKey("nat", name), ()) for name in names),
        )
    together, others = update.applied.deletion_order([name for name in unused if name not in kept])
    if (most := update.desired.most_deleted) is not None:
        others = others[: max(0, max(most, written) - len(together))]
    for names in (together, *_portions(others, limit)):
        yield Chunk(
            empty_chains(names) + delete_chains(names),
            deleted=tuple(ChainKey("nat", name) for name in names),
        )


def _names(batched: Iterable[ChainUpdate]) -> Iterator[str]:
    return (name for batch in batched for port in batch.ports for name in port.names.split())


def _unused(replaced: Mapping[str, AppliedChain], used: Iterable[str]) -> dict[str, AppliedChain]:
    if not replaced:
        return {}
    used = frozenset(used)
    return {name: chain for name, chain in replaced.items() if name not in used}


def most_chains(least: int, table: int) -> int:
    """Return how many chains a block may have in a table with so many chains, at least `least`."""
    return max(least, min(_MOST_CHAINS, table // _TABLE_PER_BLOCK))


def batches(updates: Iterable[ChainUpdate], most: Callable[[int], int]) -> Iterator[ChainUpdate]:
    """Join updates to batches of not too many chains and rules; divide one that alone has more.

    `most` returns the limit of chains for a batch after so many written chains.
    """
    chains: list[Chain] = []
    ports: list[AppliedPort] = []
    rules = written = 0
    for update in updates:
        limit = most(written)
        added = sum(len(chain.rules) for chain in update.chains)
        full = len(chains) + len(update.chains) > limit or rules + added > _MOST_RULES
        if chains and update.chains and full:
            yield ChainUpdate(tuple(chains), tuple(ports))
            written += len(chains)
            chains, ports, rules = [], [], 0
        # Chains come before those they jump to, which must exist first.
        if len(update.chains) > limit or added > _MOST_RULES:
            for chain in reversed(update.chains):
                if chains and (len(chains) >= limit or rules + len(chain.rules) > _MOST_RULES):
                    yield ChainUpdate(tuple(chains))
                    written += len(chains)
                    chains, rules = [], 0
                chains.append(chain)
                rules += len(chain.rules)
        else:
            chains += update.chains
            rules += added
        ports += update.ports
    if chains or ports:
        yield ChainUpdate(tuple(chains), tuple(ports))


def _portions(items: tuple[_T, ...], size: int) -> Iterator[tuple[_T, ...]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _written(chains: Sequence[Chain]) -> Chunk:
    return Chunk(write_chains(chains), tuple(chains))


def _block(table: str, chunk: Chunk) -> Chunk:
    return chunk._replace(text=block(table, chunk.text))


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        chains=tuple(chain for chunk in chunks for chain in chunk.chains),
        deleted=tuple(key for chunk in chunks for key in chunk.deleted),
        ports=tuple(port for chunk in chunks for port in chunk.ports),
    )


def _blocks(table: str, steps: Iterable[Chunk], chains_per_block: int | None) -> Iterator[Chunk]:
    """Yield a block for each step, or one for all if there is no limit."""
    if chains_per_block is None:
        yield from _one_block(table, steps)
    else:
        yield from (_block(table, step) for step in steps)


def _one_block(table: str, steps: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the steps as the pieces of one block, so that iptables-restore reads one while the next is rendered."""
    begun = False
    for step in steps:
        if step.text and not begun:
            begun = True
            step = step._replace(text=f"*{table}\n{step.text}")
        yield step
    if begun:
        yield Chunk("COMMIT\n")
