"""The applied state: which chains of ours one family's tables hold, and the update from it to the desired rules."""

import contextlib
import graphlib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.objects import Key
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.digests import (
    ABSENT,
    CHAIN_ENTRIES,
    MISSING_CHAIN,
    AppliedChain,
    AppliedPort,
    Desired,
    DesiredPort,
    KeptPort,
    PortTotals,
    digest,
)
from pykubeproxy.rules.dispatch import SharedEntries, Tree, rules_by_chain
from pykubeproxy.rules.iptables_save import parse_target
from pykubeproxy.rules.ownership import is_ours, is_owned, referenced_by_others, with_branches
from pykubeproxy.rules.ruleset import ChainKey, Rules, Ruleset
from pykubeproxy.rules.service import PortRules
from pykubeproxy.rules.text import Chain
from pykubeproxy.services.ports import PortName

_FRONTEND = re.compile(r"(?:-d (\S+)/(?:32|128) )?.*--dport (\d+)(?: |$)")


class ChainUpdate(NamedTuple):
    """Chains that must be written, and what to keep of their service ports afterwards."""

    chains: tuple[Chain, ...]
    ports: tuple[AppliedPort, ...] = ()


class Update(msgspec.Struct, frozen=True):
    """What to write and delete so that the tables hold the desired rules.

    - `fixed`, `shared`: chains to write that belong to no single Service; `shared` are of table nat
    - `entries`: the desired entries of the shared chains to render
    - `trees`: these chains, with the branches below them

    `chains()` renders the chains of service ports again at each call, so that memory never holds all of them.
    """

    applied: "AppliedState"
    desired: Desired
    fixed: tuple[Chain, ...]
    shared: tuple[Chain, ...]
    entries: Mapping[ChainKey, SharedEntries]
    trees: Mapping[ChainKey, Tree]

    def chains(self) -> Iterator[ChainUpdate]:
        """Render one service port after the other, small Services first, then the branches that lead to them."""
        for _, key in sorted((_size(ports), key) for key, ports in self.desired.services.items()):
            yield from self.applied.compare_service(key, self.desired.services[key])
        for tree in self._nat_trees().values():
            branches = (Chain(_nat(name), rules) for name, rules in tree.chains)
            yield from (ChainUpdate((chain,)) for chain in branches if self.applied.differs(chain))

    def replaced_chains(self) -> dict[str, AppliedChain]:
        """Return the chains of table nat that the update may leave unused.

        Branches that it keeps are not among them; the caller drops the chains of service ports once they are rendered.
        """
        trees = self._nat_trees()
        replaced = self.applied.chains_below(self.desired.services, trees)
        for tree in trees.values():
            for name, _ in tree.chains:
                replaced.pop(name, None)
        return replaced

    def _nat_trees(self) -> Mapping[ChainKey, Tree]:
        return {root: tree for root, tree in self.trees.items() if root.table == "nat"}


class AppliedState:
    """Track the chains of ours that the tables of one family hold: a digest and an owner for each.

    The owner is a service port, or a shared chain for the branches of its tree. Chains found in live tables, and unused
    ones, have no owner until an update needs or deletes them; no rule of ours leads there. Each of them comes before those
    to which it refers.
    """

    def __init__(self) -> None:
        self._services: dict[Key, tuple[AppliedPort, ...]] = {}
        self._totals = PortTotals()
        self._chains: dict[ChainKey, AppliedChain] = {}
        # The entries in shared chains as of the last update, and the Services that have fewer by now.
        self._entries: dict[ChainKey, SharedEntries] = {}
        self._withdrawn: set[Key] = set()
        # The entries that adopted tables hold in shared chains of table filter.
        self._found: dict[ChainKey, SharedEntries] = {}
        self._unclaimed: dict[str, AppliedChain] = {}
        self._referenced: frozenset[ChainKey] = frozenset()
        # What others may have changed: adopted tables until the next update, or just some chains.
        self._live: Ruleset | None = None
        self._may_hold_foreign_rules = False

    # Read.

    def services(self) -> Collection[Key]:
        """Return the Services that have rules."""
        return self._services.keys()

    def ports(self, service: Key) -> tuple[AppliedPort, ...]:
        """Return the ports of a Service that have rules, by name."""
        return self._services.get(service, ())

    def misses_chains(self, service: Key) -> bool:
        """Return whether the tables lack a chain of the ports of a Service."""
        return any(ABSENT in port.digests for port in self.ports(service))

    def has_unused_chains(self) -> bool:
        """Return whether the tables hold chains that no rule of ours uses."""
        return bool(self._unclaimed)

    def endpoints(self) -> int:
        """Return the number of endpoints, each counted once for every service port."""
        return self._totals.endpoints

    def rule_counts(self) -> Mapping[str, int]:
        """Return how many rules of ours each table holds."""
        unused = sum(chain.rules for chain in self._unclaimed.values())
        count = Counter({"nat": self._totals.rules + unused})
        for key, chain in self._chains.items():
            count[key.table] += chain.rules
        return count

    def chain_count(self) -> int:
        """Return the number of chains."""
        return len(self._chains) + self._totals.chains + len(self._unclaimed)

    def entry_counts(self) -> Mapping[str, int]:
        """Return how many entries of iptables-legacy our rules and chains take, by table."""
        chains = Counter(key.table for key in self._chains)
        chains["nat"] += self._totals.chains + len(self._unclaimed)
        rules = self.rule_counts()
        return {table: rules.get(table, 0) + CHAIN_ENTRIES * chains[table] for table in rules.keys() | chains}

    def digests(self) -> Iterator[tuple[ChainKey, int]]:
        """Yield each chain with its digest."""
        for key, chain in self._chains.items():
            yield key, chain.digest
        for name, chain in self._unclaimed.items():
            yield _nat(name), chain.digest
        for ports in self._services.values():
            for port in ports:
                for name, known in zip(port.names.split(), port.digests, strict=True):
                    yield _nat(name), known

    def can_only_be_emptied(self, key: ChainKey) -> bool:
        """Return whether a foreign rule refers to a chain, so that it cannot be deleted."""
        return key in self._referenced

    def differs(self, chain: Chain) -> bool:
        """Return whether the tables lack this chain or hold it with other rules; for chains that no service port owns."""
        found = self._unclaimed.get(chain.key.chain) if chain.key.table == "nat" else None
        applied = self._chains.get(chain.key) or found or MISSING_CHAIN
        return applied.digest != digest(*chain)

    def branches(self, root: ChainKey) -> tuple[ChainKey, ...]:
        """Return the chains of the tree below a shared chain."""
        return tuple(key for key, chain in self._chains.items() if chain.root == root)

    def compare_service(self, service: Key, ports: Iterable[DesiredPort | KeptPort]) -> Iterator[ChainUpdate]:
        """Render the ports of a Service and yield for each the chains that the tables lack or hold with other rules."""
        applied, unclaimed = {port.name: port for port in self.ports(service)}, self._unclaimed
        for port in ports:
            if isinstance(port, KeptPort):
                yield ChainUpdate(port.chains, (port.applied,))
                continue
            rendered = tuple(port.rules.chains())
            kept = AppliedPort.of(port, rendered)
            before = applied.get(port.name)
            known = before.chains() if before else {}
            held = [known.get(name) or unclaimed.get(name, MISSING_CHAIN) for name, _ in rendered]
            if port.reduced:
                new = zip(kept.chains().items(), held, strict=True)
                kept = kept.holding(
                    {name: was if names.is_endpoint_chain(name) else chain for (name, chain), was in new}
                )
            chains = [
                Chain(_nat(name), rules)
                for (name, rules), after, was in zip(rendered, kept.digests, held, strict=True)
                if was.digest != after
            ]
            yield ChainUpdate(tuple(chains), (kept,))

    def growing(self, port: DesiredPort, most: int) -> KeptPort | None:
        """Return which chains of endpoints and groups to write first if a port changes more than `most` pairs there.

        The port also owns the unused chains to which these refer: nothing may delete them in between.
        """
        (update,) = self.compare_service(port.name.service_key, (port,))
        root = names.cluster_chain(port.name)
        some: list[Chain] = []
        pairs = 0
        # Chains come before those to which they refer, which must exist first.
        for chain in reversed(update.chains):
            name = chain.key.chain
            is_endpoint = names.is_endpoint_chain(name)
            if is_endpoint or (name.startswith(names.CLUSTER_PREFIX) and name != root):
                pairs += 1 if is_endpoint else len(chain.rules)
                if pairs > most and some:
                    break
                some.append(chain)
        else:
            return None
        before = {kept.name: kept for kept in self.ports(port.name.service_key)}.get(port.name)
        before = before or AppliedPort.of(DesiredPort(port.name, PortRules(()), 0), ())
        targets = (parse_target(text) for chain in some for text in chain.rules)
        chains = {
            **{name: self._unclaimed[name] for name in targets if name in self._unclaimed},
            **before.chains(),
            **{chain.key.chain: AppliedChain.of(chain) for chain in some},
        }
        ordered = {name: chains[name] for name in sorted(chains, key=names.is_endpoint_chain)}
        return KeptPort(before.holding(ordered), tuple(reversed(some)))

    def unchanged(self, desired: Desired) -> Iterator[PortName]:
        """Yield the service ports of which no own chain must be written."""
        for service, ports in desired.services.items():
            for update in self.compare_service(service, ports):
                if not update.chains:
                    yield update.ports[0].name

    def deletion_order(self, unused: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the unused chains of table nat to delete together, and the others, each before those to which it refers.

        Branches may refer to one another. So may all chains that others have changed, except those of endpoints.
        """
        if self._live:
            referrers: dict[str, set[str]] = {name: set() for name in unused}
            for name in unused:
                for target in map(parse_target, self._live.chains.get(_nat(name), ())):
                    if target in referrers:
                        referrers[target].add(name)
            with contextlib.suppress(graphlib.CycleError):
                return (), tuple(graphlib.TopologicalSorter(referrers).static_order())
        foreign = self._live or self._may_hold_foreign_rules
        together = [
            name
            for name in unused
            if (not names.is_endpoint_chain(name) if foreign else _nat(name) in self._chains)
        ]
        chosen = frozenset(together)
        return tuple(together), tuple(name for name in unused if name not in chosen)

    def chains_below(
        self, services: Mapping[Key, Iterable[DesiredPort | KeptPort]], roots: Collection[ChainKey]
    ) -> dict[str, AppliedChain]:
        """Return the unclaimed chains, those of these Services, and those of the trees below these roots.

        Ports that stay as they are do not count.
        """
        chains = dict(self._unclaimed)
        for service, ports in services.items():
            kept = {port.name for port in ports if isinstance(port, KeptPort)}
            for port in self.ports(service):
                if port.name not in kept:
                    chains.update(port.chains())
        chains.update((key.chain, chain) for key, chain in self._chains.items() if chain.root in roots)
        return {name: chain for name, chain in chains.items() if chain.digest != ABSENT}

    def update_to(self, desired: Desired) -> Update:
        """Return what to write and delete; do not change this state."""
        entries = self._shared_entries(desired)
        trees = {
            key: shared_entries.arranged(desired.node_port_jumps, desired.options.dispatch)
            for key, shared_entries in entries.items()
        }
        roots = (Chain(key, tree.root) for key, tree in trees.items() if key.table == "nat")
        fixed = itertools.starmap(Chain, skeleton.fixed_chains(desired.options).items())
        return Update(
            applied=self,
            desired=desired,
            fixed=tuple(filter(self.differs, fixed)),
            shared=tuple(filter(self.differs, roots)),
            entries=entries,
            trees=trees,
        )

    def filter_entries(self, key: ChainKey) -> SharedEntries:
        """Return the applied entries of a shared chain of table filter: they stay in force while nat changes.

        A chain that is missing has none.
        """
        if key not in self._chains:
            return SharedEntries(key)
        return self._entries.get(key) or self._found.get(key) or SharedEntries(key)

    # Change.

    def adopt(self, live: Ruleset) -> None:
        """Replace the kept digests by those of the `live` chains.

        Owners stay as they are; chains without an owner are unclaimed.
        """
        self._live = live
        ours = {key: rules for key, rules in live.chains.items() if is_ours(key)}
        owned = {key for key in ours if is_owned(key)}
        self._unclaimed = {
            key.chain: AppliedChain.of(Chain(key, ours[key])) for key in owned if key.table == "nat"
        }
        self._referenced = referenced_by_others(live)
        roots = {key: chain.root for key, chain in self._chains.items() if chain.root}
        # A full sync, which adopts, renders all shared chains: any of filter may own the branches that are no longer used.
        roots = {**{key: skeleton.FILTER_SERVICES for key in owned if key.table == "filter"}, **roots}
        self._chains = {
            key: AppliedChain.of(Chain(key, rules), roots.get(key))
            for key, rules in ours.items()
            if key in roots or key not in owned
        }
        self._entries.clear()
        self._withdrawn.clear()
        self._found = {key: _filter_entries(live, key) for key in skeleton.SHARED if key.table == "filter"}
        for key in roots:
            if key.table == "nat":
                self._unclaimed.pop(key.chain, None)
        self._totals = PortTotals()
        for service, ports in self._services.items():
            self._services[service] = tuple(
                port.holding({name: self._unclaimed.pop(name, MISSING_CHAIN) for name in port.names.split()})
                for port in ports
            )
            self._totals.add(self._services[service])

    def keep(self, service: Key, live: Ruleset) -> bool:
        """Let a Service keep the rules that the adopted `live` tables hold, after a sync that may have failed halfway.

        Its ports then own all chains to which their rules lead. A port of which a chain is missing, or whose rules lead to
        a chain of others, loses its rules. Return whether no port does.
        """
        before, kept = self.ports(service), []
        for port in before:
            chains = port.chains()
            complete = MISSING_CHAIN not in chains.values()
            found = list(chains) if complete else []
            for name in found:  # grows
                for target in map(parse_target, live.chains[_nat(name)]):
                    if target in self._unclaimed and target not in chains:
                        chains[target] = self._unclaimed[target]
                        found.append(target)
                    elif names.is_owned(target) and target not in chains:
                        complete = False
            if complete:
                # Each before those to which it refers, and endpoint chains refer to none.
                chains = {name: chains[name] for name in sorted(found, key=names.is_endpoint_chain)}
                kept.append(port.holding(chains))
                for name in chains:
                    self._unclaimed.pop(name, None)
            else:
                own = port.chains().items()
                self._unclaimed.update((name, chain) for name, chain in own if chain != MISSING_CHAIN)
        self._totals.subtract(self._services.pop(service))
        self._totals.add(kept)
        if kept:
            self._services[service] = tuple(kept)
        return len(kept) == len(before)

    def hold(self, chain: Chain) -> None:
        """Record a fixed chain that was written apart from an update, so that the next one restores it."""
        self._chains[chain.key] = AppliedChain.of(chain)

    def hold_ports(self, ports: Iterable[AppliedPort]) -> None:
        """Record the ports of Services that had none; those of one Service come together."""
        for service, group in itertools.groupby(ports, key=lambda port: port.name.service_key):
            self._services[service] = tuple(group)
            self._totals.add(self._services[service])

    def withdraw(
        self, service: Key, frontends: Mapping[PortName, Container[tuple[str, int]]]
    ) -> set[ChainKey]:
        """Let the next update remove the entries of a Service for other frontends than these, and leave its own chains.

        Returns the shared chains that must be rendered for that. Entries without a port stay.
        """
        changed: set[ChainKey] = set()
        ports = []
        for port in self.ports(service):
            served = frontends.get(port.name, ())
            entries = tuple(
                (key, kept)
                for key, rules in port.entries
                if (kept := tuple(rule for rule in rules if (at := _frontend(rule)) is None or at in served))
            )
            changed |= {key for key, _ in {*port.entries} ^ {*entries}}
            ports.append(msgspec.structs.replace(port, entries=entries))
        if changed:
            self._services[service] = tuple(ports)
            self._withdrawn.add(service)
        return changed

    def observe(self, changed: Collection[ChainKey], live: Ruleset) -> tuple[set[Key], set[ChainKey]]:
        """Record what `live` tables hold of chains that others have changed.

        Returns the Services and the shared chains that must be rendered for the next update to restore them.
        """
        self._may_hold_foreign_rules = True
        owned = {key.chain for key in changed if key.table == "nat"}
        services = {
            service
            for service, ports in self._services.items()
            if any(not owned.isdisjoint(port.names.split()) for port in ports)
        }
        for service in services:
            self._totals.subtract(self.ports(service))
            self._services[service] = tuple(_observed(port, changed, live) for port in self.ports(service))
            self._totals.add(self._services[service])
        shared = set()
        for key in changed:
            if self._unclaimed.pop(key.chain, None) and key in live.chains:
                self._unclaimed[key.chain] = AppliedChain.of(Chain(key, live.chains[key]))
            if applied := self._chains.pop(key, None):
                shared |= {root for root in (key, applied.root) if root in skeleton.SHARED}
                if (rules := live.chains.get(key)) is not None:
                    self._chains[key] = AppliedChain.of(Chain(key, rules), applied.root)
        return services, shared

    def after(
        self, update: Update, ports: Sequence[AppliedPort], deleted: Iterable[ChainKey]
    ) -> "AppliedState":
        """Return the state after an applied update; `ports` are those that it rendered, `deleted` the deleted chains.

        The returned state reuses the storage of this one: do not use this one afterwards. Copying 55,000 entries would cost
        more than most updates.
        """
        unused = update.replaced_chains()
        gone = (key.chain for key in deleted if key.table == "nat")
        for name in itertools.chain(gone, *(port.names.split() for port in ports if unused)):
            unused.pop(name, None)
        for chain in update.fixed:
            self._chains[chain.key] = AppliedChain.of(chain)
        for key in [key for key, chain in self._chains.items() if chain.root in update.trees]:
            del self._chains[key]
        for root, tree in update.trees.items():
            self._chains[root] = AppliedChain.of(Chain(root, tree.root))
            for name, rules in tree.chains:
                key = ChainKey(root.table, name)
                self._chains[key] = AppliedChain.of(Chain(key, rules), root)
        together, others = self.deletion_order(unused)
        self._unclaimed = {
            name: unused[name] for name in (*together, *others) if not self.can_only_be_emptied(_nat(name))
        }
        self._live, self._may_hold_foreign_rules = None, False
        self._entries |= update.entries
        self._withdrawn.clear()
        self._found.clear()
        for service in update.desired.services:
            self._totals.subtract(self._services.pop(service, ()))
        self.hold_ports(ports)
        return self

    def _shared_entries(self, desired: Desired) -> dict[ChainKey, SharedEntries]:
        """Return the entries of the shared chains in which some change, and of those that `desired` names."""
        keys = set(desired.shared)
        for service, ports in desired.services.items():
            if len(keys) < len(skeleton.SHARED):
                keys |= self._changed_entries(service, ports)
        found: dict[ChainKey, SharedEntries] = {}
        rules: dict[Key, dict[ChainKey, Rules]] = {}
        for key in (chain_key for chain_key in skeleton.SHARED if chain_key in keys):
            changed = desired.services.keys() | (
                self._withdrawn if key in self._entries else self._services.keys()
            )
            for service in changed - rules.keys():
                now: Iterable[DesiredPort | KeptPort | AppliedPort]
                now = desired.services[service] if service in desired.services else self.ports(service)
                rules[service] = rules_by_chain(port.entries for port in now)
            before = self._entries.get(key) or SharedEntries(key)
            found[key] = before.replacing({service: rules[service].get(key, ()) for service in changed})
        return found

    def _changed_entries(self, service: Key, ports: Iterable[DesiredPort | KeptPort]) -> set[ChainKey]:
        before = {port.name: port.entries for port in self.ports(service)}
        after = {port.name: port.entries for port in ports}
        return {
            key
            for name in before.keys() | after.keys()
            if before.get(name) != after.get(name)
            for key, _ in {*before.get(name, ())} ^ {*after.get(name, ())}
        }


def _filter_entries(live: Ruleset, key: ChainKey) -> SharedEntries:
    rules = tuple(rule for rules in with_branches(live, key).values() for rule in rules if "-j " in rule)
    return SharedEntries(key).with_lost(rules)


def _frontend(entry: str) -> tuple[str, int] | None:
    """Return the address of an entry, "" if it matches more than one, and its port; None if it has no port."""
    match = _FRONTEND.match(entry)
    return (match[1] or "", int(match[2])) if match else None


def _size(ports: Iterable[DesiredPort | KeptPort]) -> int:
    return sum(port.endpoints for port in ports)


def _observed(port: AppliedPort, changed: Collection[ChainKey], live: Ruleset) -> AppliedPort:
    return port.holding(
        {
            name: _observed_chain(live, key) if (key := _nat(name)) in changed else chain
            for name, chain in port.chains().items()
        }
    )


def _observed_chain(live: Ruleset, key: ChainKey) -> AppliedChain:
    rules = live.chains.get(key)
    return MISSING_CHAIN if rules is None else AppliedChain.of(Chain(key, rules))


def _nat(chain: str) -> ChainKey:
    return ChainKey("nat", chain)
