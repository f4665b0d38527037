"""The known tables: which chains of ours one family's tables hold, and who owns each. True after every committed block.

A plan (`plan.py`) turns the difference to the desired rules into chunks of restore input. Each chunk carries the facts that
hold once its block is in force: `KnownTables.commit` records them. Besides, only what was read changes what chains hold;
all other methods change owners and entries.
"""

import contextlib
import graphlib
import itertools
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Set
from typing import NamedTuple, TypeAlias

import msgspec

from pykubeproxy.objects import Key
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.digests import ABSENT, CHAIN_ENTRIES, EMPTY, digest
from pykubeproxy.rules.dispatch import SharedEntries, rules_by_chain
from pykubeproxy.rules.iptables_save import parse_rule, parse_target
from pykubeproxy.rules.ownership import is_ours, is_owned, referenced_by_others, with_branches
from pykubeproxy.rules.ruleset import ChainKey, Entries, Rules, Ruleset
from pykubeproxy.rules.text import Chain
from pykubeproxy.services.ports import PortName

# What names the chains of a service port to which others than its own jump, each before those to which it refers.
_TOPS = (names.firewall_chain, names.external_chain, names.cluster_chain, names.local_chain)
# The tables with chains of ours.
TABLES = ("mangle", "filter", "nat")
_FRONTEND = re.compile(r"(?:-d (\S+)/(?:32|128) )?.*--dport (\d+)(?: |$)")


class KnownChain(NamedTuple):
    """A chain as a digest. `rules` is their number; `root` is the shared chain above a branch of a dispatch tree."""

    digest: int
    rules: int
    root: ChainKey | None = None

    @classmethod
    def of(cls, chain: Chain, root: ChainKey | None = None) -> "KnownChain":
        """Return the known chain of these rules."""
        return cls(digest(*chain), len(chain.rules), root)


MISSING_CHAIN = KnownChain(ABSENT, 0)


class KnownPort(msgspec.Struct, frozen=True):
    """The chains of a service port in table nat, as digests, and its rules in shared chains.

    `names` are those of its own chains, separated by spaces: one text takes a third of the memory of many. `digests`
    are those of these chains, `sizes` are their numbers of rules. `entries` are the rules that shared chains hold for it,
    or that they must hold next: see `KnownTables.outdated`.
    """

    name: PortName
    endpoints: int
    names: str
    digests: "array[int]"
    sizes: "array[int]"
    entries: Entries

    @classmethod
    def of(
        cls, name: PortName, endpoints: int, chains: Collection[tuple[str, Rules]], entries: Entries
    ) -> "KnownPort":
        """Return the digests of a port with these chains."""
        return cls(
            # A copy: the name itself lies between endpoints in memory, and would keep their pages from being freed.
            name=msgspec.structs.replace(name),
            endpoints=endpoints,
            names=" ".join([chain for chain, _ in chains]),
            digests=array("q", [digest(nat(chain), rules) for chain, rules in chains]),
            sizes=array("I", [len(rules) for _, rules in chains]),
            entries=entries,
        )

    def chains(self) -> "dict[str, KnownChain]":
        """Return each own chain."""
        return dict(zip(self.names.split(), map(KnownChain, self.digests, self.sizes), strict=True))

    def existing_chains(self) -> set[str]:
        """Return the own chains that the tables hold, with any rules."""
        return {name for name, kept in zip(self.names.split(), self.digests, strict=True) if kept != ABSENT}

    def holding(self, chains: "Mapping[str, KnownChain]") -> "KnownPort":
        """Return the port with these own chains."""
        return msgspec.structs.replace(
            self,
            names=" ".join(chains),
            digests=array("q", (chain.digest for chain in chains.values())),
            sizes=array("I", (chain.rules for chain in chains.values())),
        )


class PortsWritten(NamedTuple):
    """The tables hold all own chains of these service ports; those that they had before, and no longer have, are unused."""

    ports: tuple[KnownPort, ...]


class PortPart(NamedTuple):
    """The tables hold these own chains of a service port beside those that it had before."""

    port: PortName
    chains: Mapping[str, KnownChain]


class PortsGone(NamedTuple):
    """These service ports need no rules any more; their chains are unused."""

    ports: tuple[PortName, ...]


class ChainsWritten(NamedTuple):
    """The tables hold these chains, which no service port owns: fixed, shared and unused ones, and branches."""

    chains: Mapping[ChainKey, KnownChain]


class Arranged(NamedTuple):
    """A shared chain and its branches hold these entries; other branches of it are unused."""

    root: ChainKey
    entries: SharedEntries
    branches: frozenset[ChainKey]
    is_final: bool = True


class ChainsDeleted(NamedTuple):
    """These chains are gone."""

    chains: tuple[ChainKey, ...]


class LinesWritten(NamedTuple):
    """The chains of others in a table hold our rules: see `KnownTables.ensured`."""

    table: str


Fact: TypeAlias = (
    PortsWritten | PortPart | PortsGone | ChainsWritten | Arranged | ChainsDeleted | LinesWritten
)


class KnownTables:
    """Track the chains of ours that the tables of one family hold: a digest and an owner for each.

    The owner is a service port, or a shared chain for the branches of its tree. An unused chain has no owner.

    - `unread`: the tables that must be read before the next plan: all at first
    - `doubtful`: chains of which nobody knows whether the last write of them took effect, with the owners that they have
      if it did; they must be read before the next plan, too
    - `outdated`: shared chains that must be rendered, with the Services of which they may hold other entries
    - `ensured`: the lines that add our missing rules to chains of others, such as `-I INPUT …`, by table
    """

    def __init__(self) -> None:
        self.unread: frozenset[str] = frozenset(TABLES)
        self.doubtful: dict[ChainKey, PortName | ChainKey | None] = {}
        self.outdated: dict[ChainKey, set[Key]] = {}
        self.ensured: dict[str, tuple[str, ...]] = {}
        # By name: a tuple takes a fifth of the memory of a dict.
        self._ports: dict[Key, tuple[KnownPort, ...]] = {}
        self._totals: Counter[str] = Counter()
        self._chains: dict[ChainKey, KnownChain] = {}
        self._unused: dict[ChainKey, KnownChain] = {}
        # The entries that shared chains hold. Read tables show only those of table filter, and not whose they are.
        self._entries: dict[ChainKey, SharedEntries] = {}
        self._found: dict[ChainKey, SharedEntries] = {}
        self._referenced: frozenset[ChainKey] = frozenset()
        # The tables as read, while unused chains may hold rules that we did not write.
        self._live: Ruleset | None = None
        self._may_hold_foreign_rules = False

    # Read.

    @property
    def is_certain(self) -> bool:
        """Return whether nothing must be read before the next plan."""
        return not self.unread and not self.doubtful

    def services(self) -> Collection[Key]:
        """Return the Services that have rules."""
        return self._ports.keys()

    def ports(self, service: Key) -> tuple[KnownPort, ...]:
        """Return the ports of a Service that have rules, by name."""
        return self._ports.get(service, ())

    def port(self, name: PortName) -> KnownPort | None:
        """Return a service port that has rules."""
        own = self.ports(name.service_key)
        at = bisect_left(own, name, key=_name_of)
        return own[at] if at < len(own) and own[at].name == name else None

    def unused(self) -> Mapping[ChainKey, KnownChain]:
        """Return the chains that no rule of ours needs."""
        return self._unused

    def can_delete(self) -> bool:
        """Return whether a plan would delete or empty unused chains."""
        return any(
            chain.digest != EMPTY or key not in self._referenced for key, chain in self._unused.items()
        )

    def endpoints(self) -> int:
        """Return the number of endpoints, each counted once for every service port."""
        return self._totals["endpoints"]

    def rule_counts(self) -> Mapping[str, int]:
        """Return how many rules of ours each table holds."""
        count = Counter({"nat": self._totals["rules"]})
        for chains in (self._chains, self._unused):
            for key, chain in chains.items():
                count[key.table] += chain.rules
        return count

    def chain_count(self) -> int:
        """Return the number of chains."""
        return len(self._chains) + self._totals["chains"] + len(self._unused)

    def entry_counts(self) -> Mapping[str, int]:
        """Return how many entries of iptables-legacy our rules and chains take, by table."""
        chains = Counter(key.table for key in (*self._chains, *self._unused))
        chains["nat"] += self._totals["chains"]
        rules = self.rule_counts()
        return {table: rules.get(table, 0) + CHAIN_ENTRIES * chains[table] for table in rules.keys() | chains}

    def digests(self) -> Iterator[tuple[ChainKey, int]]:
        """Yield each chain with its digest, except what must be read first."""
        for chains in (self._chains, self._unused):
            for key, chain in chains.items():
                if key not in self.doubtful:
                    yield key, chain.digest
        for ports in self._ports.values():
            for port in ports:
                for name, known in zip(port.names.split(), port.digests, strict=True):
                    if (key := nat(name)) not in self.doubtful:
                        yield key, known

    def can_only_be_emptied(self, key: ChainKey) -> bool:
        """Return whether a foreign rule refers to a chain, so that it cannot be deleted."""
        return key in self._referenced

    def chain(self, key: ChainKey) -> KnownChain:
        """Return a chain that no service port owns; `MISSING_CHAIN` if there is none."""
        return self._chains.get(key) or self._unused.get(key) or MISSING_CHAIN

    def differs(self, chain: Chain) -> bool:
        """Return whether the tables lack this chain or hold it with other rules; for chains that no service port owns."""
        return self.chain(chain.key).digest != digest(*chain)

    def branches(self, root: ChainKey) -> tuple[ChainKey, ...]:
        """Return the chains of the tree below a shared chain."""
        return tuple(key for key, chain in self._chains.items() if chain.root == root)

    def lead_to_services(self) -> bool:
        """Return whether shared chains of table nat may hold rules that lead to Services."""
        shared = (key for key in skeleton.SHARED if key.table == "nat")
        return any(key in self._chains and self._chains[key].rules for key in shared)

    def entries_in_force(self, root: ChainKey) -> SharedEntries:
        """Return the entries of a shared chain of table filter: they stay in force while nat changes."""
        if root not in self._chains:
            return SharedEntries(root)
        return self._entries.get(root) or self._found.get(root) or SharedEntries(root)

    def shared_entries(
        self, roots: Iterable[ChainKey], changed: Mapping[Key, Mapping[PortName, Entries]]
    ) -> dict[ChainKey, SharedEntries]:
        """Return the entries that shared chains must hold; `changed` are those of the ports of some Services."""
        found: dict[ChainKey, SharedEntries] = {}
        rules: dict[Key, dict[ChainKey, Rules]] = {}
        for root in roots:
            known = self._entries.get(root)
            services = changed.keys() | (self.outdated.get(root, set()) if known else self._ports.keys())
            for service in services - rules.keys():
                ports = changed.get(service)
                rules[service] = rules_by_chain(
                    (port.entries for port in self.ports(service)) if ports is None else ports.values()
                )
            before = known or SharedEntries(root)
            found[root] = before.with_services(
                {
                    service: rules[service].get(root, ())
                    for service in services
                    if root in rules[service] or service in before.services
                }
            )
        return found

    def deletion_order(self, unused: Mapping[ChainKey, KnownChain]) -> tuple[list[ChainKey], list[ChainKey]]:
        """Return the unused chains to delete together, and the others, each before those to which it refers.

        Branches may refer to one another. So may all chains that others have changed, except those of endpoints.
        """
        if self._live is not None:
            referrers: dict[ChainKey, set[ChainKey]] = {key: set() for key in unused}
            for key in unused:
                for target in map(parse_target, self._live.chains.get(key, ())):
                    if (at := ChainKey(key.table, target)) in referrers:
                        referrers[at].add(key)
            with contextlib.suppress(graphlib.CycleError):
                return [], list(graphlib.TopologicalSorter(referrers).static_order())
        foreign = self._live is not None or self._may_hold_foreign_rules
        together = [
            key
            for key, chain in unused.items()
            if (not names.is_endpoint_chain(key.chain) if foreign else chain.root)
        ]
        chosen = frozenset(together)
        return together, [key for key in unused if key not in chosen]

    # Write.

    def commit(self, facts: Iterable[Fact]) -> None:
        """Record what holds since a block is in force."""
        for fact in facts:
            match fact:
                case PortsWritten(written):
                    self._replace({port.name: port for port in written})
                case PortPart(name, chains):
                    self._add_chains(name, chains)
                case PortsGone(gone):
                    self._replace(dict.fromkeys(gone))
                    if self.doubtful:
                        self.doubtful = {k: None if o in gone else o for k, o in self.doubtful.items()}
                case ChainsWritten(chains):
                    for key, chain in chains.items():
                        of = self._unused if key in self._unused and not chain.root else self._chains
                        of[key] = chain
                        if of is self._chains:
                            self._unused.pop(key, None)
                        # Until the whole tree is in force.
                        if root := chain.root or (key if key in skeleton.SHARED else None):
                            self.outdated.setdefault(root, set())
                case Arranged(root, entries, branches, is_final):
                    self._entries[root] = entries
                    for key in self.branches(root):
                        if key not in branches:
                            self._unused[key] = self._chains.pop(key)
                    for key in branches if self._unused else ():
                        if unused := self._unused.pop(key, None):
                            self._chains[key] = unused._replace(root=root)
                    if is_final:
                        self.outdated.pop(root, None)
                case ChainsDeleted(deleted):
                    for key in deleted:
                        self._unused.pop(key, None)
                case LinesWritten(table):
                    self.ensured.pop(table, None)

    def doubt(self, facts: Iterable[Fact]) -> None:
        """Record that nobody knows whether a block with these facts is in force."""
        for fact in facts:
            match fact:
                case PortsWritten(written):
                    for port in written:
                        self.doubtful |= dict.fromkeys(map(nat, port.names.split()), port.name)
                case PortPart(name, chains):
                    self.doubtful |= dict.fromkeys(map(nat, chains), name)
                case ChainsWritten(chains):
                    self.doubtful |= {key: chain.root for key, chain in chains.items()}
                case Arranged(root, _, _):
                    if root.table == "filter":  # its entries in force are unknown, too
                        self.unread |= {root.table}
                case ChainsDeleted(deleted):
                    self.doubtful |= dict.fromkeys(deleted)
                case LinesWritten(table):
                    self.unread |= {table}

    def broke_off(self) -> None:
        """Record that a plan failed: what was read before no longer shows to which chains unused ones refer."""
        if self._live is not None:
            self._live, self._may_hold_foreign_rules = None, True

    def withdraw(self, service: Key, frontends: Mapping[PortName, Container[tuple[str, int]]]) -> None:
        """Have the next plan remove the entries of a Service for other frontends than these, and leave its own chains.

        Entries without a port stay.
        """
        for port in self.ports(service):
            served = frontends.get(port.name, ())
            entries = tuple(
                (key, kept)
                for key, rules in port.entries
                if (kept := tuple(rule for rule in rules if (at := _frontend(rule)) is None or at in served))
            )
            if entries != port.entries:
                self._replace({port.name: msgspec.structs.replace(port, entries=entries)})

    def drop_chains(self, name: PortName) -> None:
        """Record that the rules of a service port do not need its own chains: they are unused."""
        if port := self.port(name):
            self._replace({name: port.holding({})})

    def withdraw_damaged(self, service: Key) -> None:
        """Have the next plan remove the entries of a Service that jump to a missing chain, or to a port that lacks one."""
        for port in self.ports(service):
            self._keep_entries(port, () if ABSENT in port.digests else port.entries)

    def put_back(self, name: PortName, entries: Entries) -> None:
        """Have the next plan write these entries for a service port, those that it had: others were rejected."""
        if port := self.port(name):
            self._keep_entries(port, entries)
        for root in skeleton.SHARED:  # one of them may hold the others already
            self.outdated.setdefault(root, set()).add(name.service_key)

    def claim(self, ports: Iterable[PortName], live: Ruleset) -> None:
        """Record what the tables, as read, hold of these service ports; an earlier proxy may have written it."""
        entries: dict[PortName, dict[ChainKey, list[str]]] = {name: {} for name in ports}
        titles = {(str(name), name.protocol.lower()): name for name in entries}
        tops = {make(name): name for name in entries for make in _TOPS}
        for root in skeleton.SHARED:
            waiting, seen = [root], {root}
            while waiting:
                for rule in live.chains.get(waiting.pop(), ()):
                    target = parse_target(rule)
                    name = tops.get(target) if root.table == "nat" else titles.get(_title(rule))
                    below = ChainKey(root.table, target)
                    if name:
                        entries[name].setdefault(root, []).append(rule)
                    elif names.is_owned(target) and below not in seen:
                        seen.add(below)
                        waiting.append(below)
        for name, found in entries.items():
            own = self._reachable([make(name) for make in _TOPS], live)
            if own or found or self.port(name):
                self._add_chains(name, {chain: self._unused[nat(chain)] for chain in own})
            self.put_back(name, tuple((root, tuple(rules)) for root, rules in found.items()))

    def _reachable(self, tops: Iterable[str], live: Ruleset) -> dict[str, None]:
        """Return the chains without an owner among some chains of a service port, and below them."""
        found: dict[str, None] = {}
        waiting = list(tops)
        while waiting:
            chain = waiting.pop()
            if nat(chain) in self._unused and chain not in found:
                found[chain] = None
                waiting += map(parse_target, live.chains.get(nat(chain), ()))
        return found

    def settle(self) -> None:
        """Record that a plan ended: chains that it left unused come in the order of deletion, free of foreign rules."""
        together, others = self.deletion_order(self._unused)
        self._unused = {key: self._unused[key] for key in (*together, *others)}
        self._live, self._may_hold_foreign_rules = None, False
        self._found.clear()

    # Read tables.

    def observe(self, live: Ruleset, tables: Collection[str], chains: Collection[ChainKey] = ()) -> set[Key]:
        """Record what the `live` tables hold: these tables and chains. Return the Services whose chains differ now."""
        tables = frozenset(tables)
        keys = None if "nat" in tables else {key.chain for key in chains if key.table == "nat"}
        changed = self._observe_ports(live, keys)
        if tables:
            outside = frozenset(key for key in self._referenced if key.table not in tables)
            self._referenced = outside | referenced_by_others(live)
        self._observe_chains(live, tables, chains)
        if "nat" in tables:
            self._live = live
        else:
            self._may_hold_foreign_rules = True
        if "filter" in tables:
            for root in (key for key in skeleton.SHARED if key.table == "filter"):
                self._entries.pop(root, None)
                self._found[root] = _filter_entries(live, root)
                self.outdated.setdefault(root, set())
        self.unread -= tables
        self.doubtful = {
            key: owner
            for key, owner in self.doubtful.items()
            if key.table not in tables and key not in chains
        }
        return changed

    def _observe_ports(self, live: Ruleset, read: Set[str] | None) -> set[Key]:
        """Record the own chains of ports that were read; None means all. Return the Services whose chains differ now."""
        changed: set[Key] = set()
        parts: dict[PortName, dict[str, KnownChain]] = {}
        for key, owner in self.doubtful.items():
            is_read = read is None or key.chain in read
            if isinstance(owner, PortName) and is_read and (rules := live.chains.get(key)) is not None:
                parts.setdefault(owner, {})[key.chain] = KnownChain.of(Chain(key, rules))
        for name, chains in parts.items():
            self._add_chains(name, chains)
        observed: dict[PortName, KnownPort | None] = {}
        for port in itertools.chain.from_iterable(self._ports.values()):
            own = port.names.split()
            if read is not None and read.isdisjoint(own):
                continue
            seen = {
                name: _observed(live, nat(name)) if read is None or name in read else known
                for name, known in port.chains().items()
            }
            if self.doubtful:
                # A plan that ended anywhere may have deleted chains that the port needs no more.
                seen = {
                    name: chain
                    for name, chain in seen.items()
                    if chain is not MISSING_CHAIN or nat(name) not in self.doubtful
                }
            now = port.holding(seen)
            if now.digests != port.digests:
                observed[port.name] = now
                changed.add(port.name.service_key)
        self._replace(observed)
        return changed

    def _observe_chains(self, live: Ruleset, tables: Collection[str], chains: Collection[ChainKey]) -> None:
        """Record chains that no port owns, among them new ones under our names: nothing needs these."""
        owned = {name for ports in self._ports.values() for port in ports for name in port.names.split()}
        seen = {key for key in (*self._chains, *self._unused, *live.chains) if key.table in tables} | set(
            chains
        )
        for key in seen:
            before = self._chains.get(key)
            rules = live.chains.get(key)
            root = before.root if before else None
            if owner := self.doubtful.get(key):
                root = owner if isinstance(owner, ChainKey) else root
            now = None if rules is None else KnownChain.of(Chain(key, rules), root)
            if key in skeleton.SHARED and now != before:
                self.outdated.setdefault(key, set())
            elif root and now != before:
                self.outdated.setdefault(root, set())
            self._unused.pop(key, None)
            self._chains.pop(key, None)
            if now is None or not is_ours(key) or (key.table == "nat" and key.chain in owned):
                continue
            if root or not is_owned(key):
                self._chains[key] = now
            else:
                self._unused[key] = now

    # Replace ports: the only functions that change them and the totals.

    def _keep_entries(self, port: KnownPort, entries: Entries) -> None:
        """Give a port these entries, except those that jump to a chain which it lacks."""
        existing = port.existing_chains()

        def leads_on(rule: str) -> bool:
            target = parse_target(rule)
            return not names.is_owned(target) or target in existing

        kept = tuple((key, some) for key, rules in entries if (some := tuple(filter(leads_on, rules))))
        if kept != port.entries:
            self._replace({port.name: msgspec.structs.replace(port, entries=kept)})

    def _add_chains(self, name: PortName, chains: Mapping[str, KnownChain]) -> None:
        before = self.port(name) or KnownPort.of(name, 0, (), ())
        both = {**before.chains(), **chains}
        # Each before those to which it refers: the chains of the port, those of groups, those of endpoints.
        tops = [make(name) for make in _TOPS]
        ordered = [chain for chain in tops if chain in both]
        ordered += sorted(both.keys() - {*tops}, key=lambda chain: (names.is_endpoint_chain(chain), chain))
        self._replace({name: before.holding({chain: both[chain] for chain in ordered})})

    def _replace(self, ports: Mapping[PortName, KnownPort | None]) -> None:
        """Replace ports; None removes one. Chains that they no longer have are unused, unless one of them has them."""
        services: dict[Key, list[KnownPort]] = {}
        for name, port in ports.items():
            if (own := services.get(name.service_key)) is None:
                own = services[name.service_key] = list(self.ports(name.service_key))
            at = bisect_left(own, name, key=_name_of)
            before = own[at] if at < len(own) and own[at].name == name else None
            own[at : at + bool(before)] = [port] if port else []
            self._note_replaced(before, port)
        for service, own in services.items():
            if own:
                self._ports[service] = tuple(own)
            else:
                self._ports.pop(service, None)

    def _note_replaced(self, before: KnownPort | None, after: KnownPort | None) -> None:
        self._count(before, -1)
        self._count(after, 1)
        is_renamed = before is not None and (after is None or before.names != after.names)
        names_after = after.names.split() if after and (is_renamed or self._unused) else ()
        if before and is_renamed:
            own = frozenset(names_after)
            for name, chain in before.chains().items():
                if name not in own and chain.digest != ABSENT:
                    self._unused[nat(name)] = chain
        for name in names_after if self._unused else ():
            self._unused.pop(nat(name), None)
        entries_before = before.entries if before else ()
        entries_after = after.entries if after else ()
        if entries_before != entries_after and (either := after or before):
            for key, _ in {*entries_before} ^ {*entries_after}:
                self.outdated.setdefault(key, set()).add(either.name.service_key)

    def _count(self, port: KnownPort | None, sign: int) -> None:
        if port:
            self._totals["endpoints"] += sign * port.endpoints
            self._totals["chains"] += sign * len(port.digests)
            self._totals["rules"] += sign * sum(port.sizes)


def _name_of(port: KnownPort) -> PortName:
    return port.name


def _observed(live: Ruleset, key: ChainKey) -> KnownChain:
    rules = live.chains.get(key)
    return MISSING_CHAIN if rules is None else KnownChain.of(Chain(key, rules))


def _filter_entries(live: Ruleset, key: ChainKey) -> SharedEntries:
    rules = tuple(rule for rules in with_branches(live, key).values() for rule in rules if "-j " in rule)
    return SharedEntries(key).with_lost(rules)


def _title(entry: str) -> tuple[str, str]:
    """Return the service port that an entry of table filter names, and its protocol: ports may share a name."""
    parsed = parse_rule(entry)
    return parsed.title, parsed.options.get("-p", "")


def _frontend(entry: str) -> tuple[str, int] | None:
    """Return the address of an entry, "" if it matches more than one, and its port; None if it has no port."""
    match = _FRONTEND.match(entry)
    return (match[1] or "", int(match[2])) if match else None


def nat(chain: str) -> ChainKey:
    """Return the key of a chain of table nat."""
    return ChainKey("nat", chain)
