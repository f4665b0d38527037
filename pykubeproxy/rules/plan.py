"""Plan how the tables of one family get the desired rules: chunks of restore input, in an order that interrupts no service.

First, filter gains the rules that reject or drop, and keeps its old ones. Then the chains of nat change, the shared ones
after those to which they lead, and unused chains are deleted. Last, filter loses the rules that no longer hold. New own
chains that fill a block go before all of this, as they are rendered, for nothing leads to them yet. On legacy, where a
block is a whole table, all of nat comes first if it leads to no service yet.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pykubeproxy.objects import Key
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.digests import ABSENT, EMPTY
from pykubeproxy.rules.dispatch import SharedEntries, Tree
from pykubeproxy.rules.known import (
    MISSING_CHAIN,
    Arranged,
    ChainsDeleted,
    ChainsWritten,
    Fact,
    KnownChain,
    KnownPort,
    KnownTables,
    LinesWritten,
    PortPart,
    PortsGone,
    PortsWritten,
    nat,
)
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Entries, Rules
from pykubeproxy.rules.service import PortRules
from pykubeproxy.rules.text import Chain, block, delete_chains, empty_chains, join, write_chains
from pykubeproxy.services.ports import PortName

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


class DesiredPort(NamedTuple):
    """The rules a service port should have, and how many endpoints it has.

    Endpoint chains of a `reduced` one stay as they are; its rules need no others.
    """

    name: PortName
    rules: PortRules
    endpoints: int
    reduced: bool = False


class DesiredService(NamedTuple):
    """The ports that a Service should have, by name; none if it should have no rules. Ports in `stay` keep theirs."""

    service: Key
    ports: tuple[DesiredPort, ...]
    stay: frozenset[PortName] = frozenset()


class PlanLimits(NamedTuple):
    """How much a plan does.

    - `chains_per_block`: a block names about so many chains at most, more if the table has many: the time of iptables-nft
      grows with the square of their number (1.8.9 to 1.8.13). None means one block for each table, since iptables-legacy
      replaces the whole table for each block
    - `deleted`: delete about so many unused chains, or as many as are written, the rest later; None means all
    - `portion`: write so many pairs at most of a port that needs more, and its rules that lead there later; None means all
    """

    chains_per_block: int | None
    deleted: int | None = None
    portion: int | None = None


class Chunk(NamedTuple):
    """A piece of restore input that never goes beyond the end of a block, and what it does.

    `chains` are the written chains with their rules, `facts` hold once the block is in force.
    """

    text: str
    chains: tuple[Chain, ...] = ()
    facts: tuple[Fact, ...] = ()


class OwnChains(NamedTuple):
    """Chains of table nat to write, the service ports whose own chains are complete with them, and other facts.

    `part_of` is the owner of chains that do not complete it.
    """

    chains: tuple[Chain, ...]
    ports: tuple[KnownPort, ...] = ()
    facts: tuple[Fact, ...] = ()
    part_of: PortName | None = None

    def chunk(self) -> Chunk:
        """Return the step that writes them."""
        # Adopted chains are part of a port before it is complete.
        facts = (*self.facts, PortsWritten(self.ports)) if self.ports else self.facts
        return Chunk(write_chains(self.chains), self.chains, facts)


class Plan:
    """The chunks that bring the tables from what is known to what some Services should have; all others keep their rules.

    Iterate once: each Service is taken and rendered when its chunk is due, so memory never holds all chains. The chains of
    one service port share a block if they fit; else those that others jump to go first. The chunks have no text if nothing
    changes. Meanwhile nothing may change the known tables.

    Afterwards, `unfinished` are the ports of which only a portion is written, and `gone` those that need no rules any more.
    `replaced` are the former entries of ports that get others.
    """

    def __init__(
        self,
        known: KnownTables,
        services: Iterable[DesiredService],
        options: RuleOptions,
        node_port_jumps: Rules,
        limits: PlanLimits,
        shared: Iterable[ChainKey] = (),
    ) -> None:
        """Make a plan that renders the `shared` chains even if no entry in them changes."""
        self.unfinished: set[PortName] = set()
        self.gone: list[PortName] = []
        self.replaced: dict[PortName, Entries] = {}
        self._known = known
        self._services = services
        self._options = options
        self._jumps = node_port_jumps
        self._limits = limits
        self._roots = {*shared, *known.outdated}
        self._fixed = [
            chain
            for chain in itertools.starmap(Chain, skeleton.fixed_chains(options).items())
            if known.differs(chain)
        ]
        # What is known once all Services were taken: the entries of each, and the chains of nat that are unused then.
        self._entries: dict[Key, dict[PortName, Entries]] = {}
        self._claimed: set[ChainKey] = set()
        self._left: dict[ChainKey, KnownChain] = {}
        # Ports with chains that packets may visit already, and portions of such ports.
        self._held: list[DesiredPort | OwnChains] = []
        self._arranged: dict[ChainKey, tuple[SharedEntries, Tree]] | None = None

    def __iter__(self) -> Iterator[Chunk]:
        yield _block("mangle", _written(_of_table("mangle", self._fixed)))
        if self._limits.chains_per_block is None:
            yield from self._one_block_a_table()
        else:
            yield from self._small_blocks(self._limits.chains_per_block)

    def _one_block_a_table(self) -> Iterator[Chunk]:
        """Yield pieces of blocks, so that iptables-restore reads one while the next is rendered."""
        most = _LEGACY_DECLARED_TOGETHER
        if not self._known.lead_to_services():
            new = batches(itertools.chain(self._new_chains(), self._changed_chains()), lambda _: most)
            yield from _one_block("nat", self._nat_steps(new, most))
            early, late = self._filter_steps(most)
            yield from _one_block("filter", [*early, *late])
            return
        # The block of filter comes first, and needs the entries of all Services.
        for _ in self._new_chains(only_hold=True):
            pass
        early, late = self._filter_steps(most)
        yield from _one_block("filter", early)
        changed = batches(self._changed_chains(), lambda _: most)
        yield from _one_block("nat", self._nat_steps(changed, most))
        yield from _one_block("filter", late)

    def _small_blocks(self, limit: int) -> Iterator[Chunk]:
        table, written = self._known.chain_count(), 0
        last: OwnChains | None = None
        for batch in batches(self._new_chains(), lambda more: most_chains(limit, table + more)):
            if last:
                yield _block("nat", _joined((self._nat_fixed(), last.chunk())))
                written += len(last.chains)
            last = batch
        early, late = self._filter_steps(limit)
        yield from (_block("filter", step) for step in early)
        table += written
        rest = itertools.chain([last] if last else [], self._changed_chains())
        changed = batches(rest, lambda more: most_chains(limit, table + more))
        first = list(itertools.islice(changed, 2))
        is_small = len(first) <= 1 and len(self._unused_chains()) <= limit
        steps = self._nat_steps(itertools.chain(first, changed), most_chains(limit, table), written)
        # A chunk is a whole block: iptables-nft finds out at COMMIT which line the kernel rejects.
        yield from (_block("nat", step) for step in ([_joined([*steps])] if is_small else steps))
        yield from (_block("filter", step) for step in late)

    def has_tree(self) -> bool:
        """Return whether a shared chain to render is a tree, as far as the Services were taken."""
        return any(tree.chains for _, tree in self._shared().values())

    def entries(self) -> Iterator[tuple[PortName, Entries]]:
        """Yield the desired entries of each service port, also of other Services, as far as the Services were taken."""
        for service in self._entries.keys() | self._known.services():
            if (desired := self._entries.get(service)) is not None:
                yield from desired.items()
            else:
                yield from ((port.name, port.entries) for port in self._known.ports(service))

    # Table nat.

    def _new_chains(self, only_hold: bool = False) -> Iterator[OwnChains]:
        """Take all Services, and yield the own chains of ports to which nothing leads yet; hold the other ports."""
        for service, ports, stay in self._services:
            before = {port.name: port for port in self._known.ports(service)}
            entries = {name: port.entries for name, port in before.items() if name in stay}
            for port in ports:
                was = before.get(port.name)
                entries[port.name] = port.rules.entries
                if only_hold and self._limits.portion is None:
                    self._held.append(port)
                    continue
                own, is_new = self._compare(port, was)
                if port.name in self.unfinished:
                    entries[port.name] = was.entries if was else ()
                if is_new and not only_hold:
                    yield own
                else:
                    self._held.append(own if port.name in self.unfinished else port)
            for name, was in before.items():
                if name not in entries:
                    self.gone.append(name)
                    self._leave(was, ())
            self._note_entries(service, before, entries)

    def _note_entries(
        self, service: Key, before: Mapping[PortName, KnownPort], after: Mapping[PortName, Entries]
    ) -> None:
        self._entries[service] = {name: after[name] for name in sorted(after)}
        for name in before.keys() | after.keys():
            was = before[name].entries if name in before else ()
            if was != after.get(name, ()):
                self.replaced[name] = was
                if len(self._roots) < len(skeleton.SHARED):
                    self._roots.update(key for key, _ in {*was} ^ {*after.get(name, ())})

    def _changed_chains(self) -> Iterator[OwnChains]:
        """Yield the own chains of the ports that were held, and the branches that lead to Services."""
        for held in self._held:
            if isinstance(held, OwnChains):
                yield held
            else:
                yield self._compare(held, self._known.port(held.name))[0]
        for root, (_, tree) in self._shared().items():
            if root.table == "nat":
                for name, rules in tree.chains:
                    if self._known.differs(chain := Chain(nat(name), rules)):
                        written = ChainsWritten({chain.key: KnownChain.of(chain, root)})
                        yield OwnChains((chain,), facts=(written,))

    def _compare(self, port: DesiredPort, before: KnownPort | None) -> tuple[OwnChains, bool]:
        """Render the own chains of a port. Return those that the tables lack or hold with other rules.

        Return also whether all of them are new, so that nothing leads to them.
        """
        rendered = tuple(port.rules.chains())
        now = KnownPort.of(port.name, port.endpoints, rendered, port.rules.entries)
        held, unused = before.chains() if before else {}, self._known.unused()
        adopted = (
            {name: unused[key] for name, _ in rendered if (key := nat(name)) in unused} if unused else {}
        )
        self._claimed.update(map(nat, adopted))
        was = {**adopted, **held}
        if port.reduced:
            now = now.holding(
                {
                    name: was.get(name, MISSING_CHAIN) if names.is_endpoint_chain(name) else new
                    for name, new in now.chains().items()
                }
            )
        both = zip(rendered, now.digests, strict=True)
        chains = [
            Chain(nat(name), rules)
            for (name, rules), after in both
            if was.get(name, MISSING_CHAIN).digest != after
        ]
        is_new = all(was.get(chain.key.chain, MISSING_CHAIN).digest == ABSENT for chain in chains)
        if (portion := self._portion(port.name, chains)) is not None:
            self.unfinished.add(port.name)
            part = OwnChains(portion, (), (PortPart(port.name, adopted),), part_of=port.name)
            return part, not before and not adopted
        if before and before.names != now.names:
            self._leave(before, now.names.split())
        facts = (PortPart(port.name, adopted),) if adopted and self._may_divide(chains) else ()
        return OwnChains(tuple(chains), (now,), facts), is_new

    def _may_divide(self, chains: Sequence[Chain]) -> bool:
        """Return whether these own chains of a port may take more than one block."""
        limit = self._limits.chains_per_block
        if limit is None:
            return False
        return len(chains) > limit or sum(len(chain.rules) for chain in chains) > _MOST_RULES

    def _portion(self, port: PortName, chains: Sequence[Chain]) -> tuple[Chain, ...] | None:
        """Return which chains of endpoints and groups to write first if a port needs more than a portion; else None."""
        if self._limits.portion is None:
            return None
        some: list[Chain] = []
        pairs = 0
        # Chains come before those to which they refer, which must exist first.
        for chain in reversed(chains):
            name = chain.key.chain
            is_endpoint = names.is_endpoint_chain(name)
            if is_endpoint or (name.startswith(names.CLUSTER_PREFIX) and name != names.cluster_chain(port)):
                pairs += 1 if is_endpoint else len(chain.rules)
                if pairs > self._limits.portion and some:
                    return tuple(reversed(some))
                some.append(chain)
        return None

    def _leave(self, port: KnownPort, kept: Iterable[str]) -> None:
        """Note the chains of a port that are unused unless it is `kept`."""
        if port.names:
            after = frozenset(kept)
            for name, chain in port.chains().items():
                if name not in after and chain != MISSING_CHAIN:
                    self._left[nat(name)] = chain

    def _nat_fixed(self) -> Chunk:
        """Return the fixed chains of table nat, once."""
        fixed = _of_table("nat", self._fixed)
        self._fixed = [chain for chain in self._fixed if chain.key.table != "nat"]
        return _written(fixed)

    def _nat_steps(self, own: Iterable[OwnChains], limit: int, written: int = 0) -> Iterator[Chunk]:
        """Yield the steps of table nat, without the lines that begin and end a block, after some `written` chains."""
        yield self._nat_fixed()
        for batch in own:
            written += len(batch.chains)
            yield batch.chunk()
        roots = {root: both for root, both in self._shared().items() if root.table == "nat"}
        chains = (Chain(root, tree.root) for root, (_, tree) in roots.items())
        facts: list[Fact] = [PortsGone(tuple(self.gone))] if self.gone else []
        facts += [
            Arranged(root, entries, frozenset(nat(name) for name, _ in tree.chains))
            for root, (entries, tree) in roots.items()
        ]
        shared = _written([*filter(self._known.differs, chains)])
        yield _joined((shared, _ensured("nat", self._known), Chunk("", facts=tuple(facts))))
        yield from self._removed(limit, written)

    def _unused_chains(self) -> dict[ChainKey, KnownChain]:
        """Return the chains of table nat that are unused once all others are written."""
        unused = {key: chain for key, chain in self._known.unused().items() if key.table == "nat"}
        unused |= self._left
        for root, (_, tree) in self._shared().items():
            if root.table == "nat":
                used = {name for name, _ in tree.chains}
                unused |= {
                    key: self._known.chain(key) for key in self._known.branches(root) if key.chain not in used
                }
                unused = {key: chain for key, chain in unused.items() if key.chain not in used}
        return {key: chain for key, chain in unused.items() if key not in self._claimed}

    def _removed(self, limit: int, written: int) -> Iterator[Chunk]:
        """Yield the steps that delete unused chains: as many as the plan may, or as it writes: they must not pile up.

        A chain is emptied and deleted in one block: if another proxy refers to it by now, the kernel rejects the block, and
        the chain keeps its rules. Only chains that foreign rules refer to are emptied and stay.
        """
        unused = self._unused_chains()
        kept = sorted(key for key in unused if self._known.can_only_be_emptied(key))
        emptied = tuple(key for key in kept if unused.pop(key).digest != EMPTY)
        yield from (_emptied(keys, keys) for keys in _portions(emptied, limit))
        together, others = self._known.deletion_order(unused)
        if (most := self._limits.deleted) is not None:
            others = others[: max(0, max(most, written) - len(together))]
        for keys in (tuple(together), *_portions(tuple(others), limit)):
            chains = [key.chain for key in keys]
            facts = (ChainsDeleted(keys),) if keys else ()
            yield Chunk(empty_chains(chains) + delete_chains(chains), facts=facts)

    # Table filter, and shared chains of both tables.

    def _shared(self) -> Mapping[ChainKey, tuple[SharedEntries, Tree]]:
        """Return the entries of the shared chains to render, arranged. Call once all Services were taken."""
        if self._arranged is None:
            roots = [root for root in skeleton.SHARED if root in self._roots]
            entries = self._known.shared_entries(roots, self._entries)
            dispatch = self._options.dispatch
            self._arranged = {root: (of, of.arranged(self._jumps, dispatch)) for root, of in entries.items()}
        return self._arranged

    def _filter_steps(self, limit: int) -> tuple[list[Chunk], list[Chunk]]:
        """Return the steps of table filter before nat changes, and those afterwards.

        If entries both come and go, the first steps write a tree with all of them. The others write the desired tree, and
        delete the branches that it lacks. A branch goes before those that jump to it, and two trees have a branch of one
        name only for the same packets. So after each step a packet meets every entry that it met before and shall meet.
        """
        known = self._known
        before: list[tuple[Chain, ChainKey | None]]
        before = [(chain, None) for chain in _of_table("filter", self._fixed)]
        after: list[tuple[Chain, ChainKey | None]] = []
        unused = {key: None for key in known.unused() if key.table == "filter"}
        desired: set[ChainKey] = set()
        first: list[Fact] = []
        last: list[Fact] = []
        for root, (entries, tree) in self._shared().items():
            if root.table != "filter":
                continue
            final = _chains(root, tree)
            in_force = known.entries_in_force(root)
            lost = entries.lost(in_force)
            both: list[Chain] = [] if lost else final
            if not lost:
                first.append(Arranged(root, entries, frozenset(chain.key for chain in final[:-1])))
            elif in_force.lost(entries):
                meanwhile = entries.with_lost(lost)
                both = _chains(root, meanwhile.arranged((), self._options.dispatch))
                branches = frozenset(chain.key for chain in both[:-1])
                first.append(Arranged(root, meanwhile, branches, is_final=False))
            last.append(Arranged(root, entries, frozenset(chain.key for chain in final[:-1])))
            before += [(chain, _above(chain, root)) for chain in both if known.differs(chain)]
            written = dict(both)
            after += [
                (chain, _above(chain, root))
                for chain in final
                if (written[chain.key] != chain.rules if chain.key in written else known.differs(chain))
            ]
            desired.update(chain.key for chain in final)
            unused |= dict.fromkeys((*known.branches(root), *written))
        early = [_written_below(some) for some in _portions(tuple(before), limit)]
        early[-1:] = [_joined((*early[-1:], _ensured("filter", known), Chunk("", facts=tuple(first))))]
        late = [_written_below(some) for some in _portions(tuple(after), limit)]
        gone = tuple(key for key in unused if key not in desired)
        late += [Chunk("", facts=tuple(last)), *self._deleted_branches(gone, limit)]
        return early, [_joined(late)] if max(len(after), len(gone)) <= limit else late

    def _deleted_branches(self, gone: tuple[ChainKey, ...], limit: int) -> Iterator[Chunk]:
        """Yield the steps that delete branches: all are emptied first, since they refer to one another."""
        known = self._known
        kept = {key for key in gone if known.can_only_be_emptied(key)}
        emptied = tuple(key for key in gone if key not in kept or known.differs(Chain(key, ())))
        for keys in _portions(emptied, limit):
            yield _emptied(keys, [key for key in keys if key in kept])
        for keys in _portions(tuple(key for key in gone if key not in kept), limit):
            yield Chunk(delete_chains(key.chain for key in keys), facts=(ChainsDeleted(keys),))


def most_chains(least: int, table: int) -> int:
    """Return how many chains a block may have in a table with so many chains, at least `least`."""
    return max(least, min(_MOST_CHAINS, table // _TABLE_PER_BLOCK))


def batches(updates: Iterable[OwnChains], most: Callable[[int], int]) -> Iterator[OwnChains]:
    """Join updates to batches of not too many chains and rules; divide one that alone has more.

    `most` returns the limit of chains for a batch after so many written chains.
    """
    chains: list[Chain] = []
    ports: list[KnownPort] = []
    facts: list[Fact] = []
    rules = written = 0
    for update in updates:
        limit = most(written)
        for number, piece in enumerate(_pieces(update, limit)):
            added = sum(len(chain.rules) for chain in piece.chains)
            is_full = len(chains) + len(piece.chains) > limit or rules + added > _MOST_RULES
            if chains and piece.chains and (number or is_full):
                yield OwnChains(tuple(chains), tuple(ports), tuple(facts))
                written += len(chains)
                chains, ports, facts, rules = [], [], [], 0
            chains += piece.chains
            ports += piece.ports
            facts += piece.facts
            rules += added
    if chains or ports or facts:
        yield OwnChains(tuple(chains), tuple(ports), tuple(facts))


def _pieces(update: OwnChains, limit: int) -> list[OwnChains]:
    """Divide an update with too many chains or rules; all pieces but the last are part of its port."""
    if len(update.chains) <= limit and sum([len(chain.rules) for chain in update.chains]) <= _MOST_RULES:
        return [update._replace(facts=(*update.facts, *_part(update.part_of, update.chains)))]
    pieces: list[list[Chain]] = [[]]
    rules = 0
    # Chains come before those they jump to, which must exist first.
    for chain in reversed(update.chains):
        if pieces[-1] and (len(pieces[-1]) >= limit or rules + len(chain.rules) > _MOST_RULES):
            pieces.append([])
            rules = 0
        pieces[-1].append(chain)
        rules += len(chain.rules)
    *parts, last = [tuple(reversed(piece)) for piece in pieces]
    owner = update.part_of or (update.ports[0].name if parts else None)
    made = [OwnChains(piece, facts=_part(owner, piece)) for piece in parts]
    made.append(OwnChains(last, update.ports, _part(update.part_of, last)))
    made[0] = made[0]._replace(facts=(*update.facts, *made[0].facts))
    return made


def _part(owner: PortName | None, chains: tuple[Chain, ...]) -> tuple[Fact, ...]:
    return (PortPart(owner, {chain.key.chain: KnownChain.of(chain) for chain in chains}),) if owner else ()


def _portions(items: tuple[_T, ...], size: int) -> Iterator[tuple[_T, ...]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _of_table(table: str, chains: Iterable[Chain]) -> list[Chain]:
    return [chain for chain in chains if chain.key.table == table]


def _chains(root: ChainKey, tree: Tree) -> list[Chain]:
    """Return the chains of a tree, each after those it jumps to, the root last."""
    branches = (Chain(ChainKey(root.table, name), rules) for name, rules in tree.chains)
    return [*branches, Chain(root, tree.root)]


def _above(chain: Chain, root: ChainKey) -> ChainKey | None:
    return None if chain.key == root else root


def _ensured(table: str, known: KnownTables) -> Chunk:
    lines = known.ensured.get(table, ())
    return Chunk(join(lines), facts=(LinesWritten(table),) if lines else ())


def _written(chains: Sequence[Chain]) -> Chunk:
    return _written_below([(chain, None) for chain in chains])


def _written_below(chains: Sequence[tuple[Chain, ChainKey | None]]) -> Chunk:
    """Return the step that writes chains; each comes with the shared chain above it if it is a branch."""
    written = tuple(chain for chain, _ in chains)
    known = {chain.key: KnownChain.of(chain, root) for chain, root in chains}
    return Chunk(write_chains(written), written, (ChainsWritten(known),) if known else ())


def _emptied(keys: Sequence[ChainKey], stay: Iterable[ChainKey]) -> Chunk:
    """Return the step that empties unused chains. Those that `stay` count as written."""
    known = dict.fromkeys(keys, KnownChain(EMPTY, 0))
    text = empty_chains(key.chain for key in keys)
    return Chunk(text, tuple(Chain(key, ()) for key in stay), (ChainsWritten(known),))


def _block(table: str, chunk: Chunk) -> Chunk:
    return chunk._replace(text=block(table, chunk.text))


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        chains=tuple(chain for chunk in chunks for chain in chunk.chains),
        facts=tuple(fact for chunk in chunks for fact in chunk.facts),
    )


def _one_block(table: str, steps: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the steps as the pieces of one block."""
    begun = False
    for step in steps:
        if step.text and not begun:
            begun = True
            step = step._replace(text=f"*{table}\n{step.text}")
        yield step
    if begun:
        yield Chunk("COMMIT\n")
