"""What the kernel holds of ours, as far as we know, and what has to change for it to hold something else."""

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.objects import Key
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.again import Again
from pykubeproxy.rules.dispatch import shared_chain
from pykubeproxy.rules.draft import Draft, Mark, Tally, Written
from pykubeproxy.rules.jumps import ensured_lines
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ownership import is_ours, referred_to_by_others
from pykubeproxy.rules.plan import Chain, Change, Rules
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import PortRules
from pykubeproxy.rules.tree import Tree
from pykubeproxy.services.ports import PortName


class Difference(NamedTuple):
    """Chains of ours in live tables: `changed` are otherwise than written, or gone; `strange` were not written by us."""

    changed: frozenset[ChainKey]
    strange: frozenset[ChainKey]


class Programmed:
    """The chains of ours in one family's tables: a digest for each, and which service port they belong to.

    Digests are Python's hash() of the rules: keyed anew in every process, and never leaving it. Rules as such are kept
    only of shared chains, which are made of many service ports' entries.
    """

    def __init__(self, live: Ruleset) -> None:
        """Start from live tables, whoever wrote them: what is already as it should be need not be written."""
        ours = {key: rules for key, rules in live.chains.items() if is_ours(key)}
        # Until the first draft is in force it is not known whose chains these are.
        self._adopted = {key.chain: hash(rules) for key, rules in ours.items() if names.is_owned(key.chain)}
        self._common = {key: Mark.of(rules) for key, rules in ours.items() if not names.is_owned(key.chain)}
        self._filter = {key: ours[key] for key in skeleton.SHARED if key in ours and key.table == "filter"}
        self._ports: dict[PortName, Written] = {}
        self._referred = frozenset(key.chain for key in referred_to_by_others(live) if key.table == "nat")
        self._jumps: Rules = ()
        # The chains below a shared one that is a tree.
        self._branches: dict[ChainKey, Mapping[str, Mark]] = {}
        # Shared chains to be gone through again, for somebody has changed them or what is below them.
        self._doubted: set[ChainKey] = set()

    def rules(self) -> Mapping[str, int]:
        """How many rules of ours each table holds."""
        count = Counter({"nat": sum(written.rules for written in self._ports.values())})
        for key, mark in self._common.items():
            count[key.table] += mark.rules
        count["nat"] += sum(mark.rules for below in self._branches.values() for mark in below.values())
        return count

    def chains(self) -> Mapping[str, int]:
        """How many chains of ours each table holds."""
        count = Counter(key.table for key in self._common)
        count["nat"] += sum(map(len, self._branches.values()))
        count["nat"] += sum(len(written.digests) for written in self._ports.values())
        return count

    def differing(self, live: Ruleset, tables: Collection[str], chains: Collection[ChainKey]) -> Difference:
        """What is otherwise in `live` than it was written, which has these tables and chains so far as they are there."""
        digests = {key: it for key, it in self._digests() if key.table in tables or key in chains}
        changed = {
            key
            for key, digest in digests.items()
            if (rules := live.chains.get(key)) is None or hash(rules) != digest
        }
        strange = {
            key
            for key in live.chains
            # What others refer to could only be emptied.
            if key not in digests and is_ours(key) and (live.chains[key] or key.chain not in self._referred)
        }
        return Difference(frozenset(changed), frozenset(strange))

    def doubt(self, changed: Collection[ChainKey], live: Ruleset) -> set[PortName]:
        """Take chains for different from what was written: the next draft writes them.

        Returns the service ports whose chains are among them; their rules are to be rendered for that draft.
        """
        for key in changed:
            self._common.pop(key, None)
            if key in self._filter:
                there = frozenset(live.chains.get(key, ()))
                self._filter[key] = tuple(rule for rule in self._filter[key] if rule in there)
        self._doubted.update(key for key in changed if key in skeleton.SHARED)
        chains = {key.chain for key in changed if names.is_owned(key.chain)}
        for root, below in self._branches.items():
            if not chains.isdisjoint(below):
                self._doubted.add(root)
                self._branches[root] = {
                    name: mark._replace(digest=~mark.digest) if name in chains else mark
                    for name, mark in below.items()
                }
        owners = {name for name, written in self._ports.items() if not chains.isdisjoint(written.chains)}
        for name in owners:
            known = self._ports[name].known()
            digests = array("q", (~known[chain] if chain in chains else known[chain] for chain in known))
            self._ports[name] = msgspec.structs.replace(self._ports[name], digests=digests)
        return owners

    def _digests(self) -> Iterator[tuple[ChainKey, int]]:
        """What the rules of each chain hash to."""
        for key, mark in self._common.items():
            yield key, mark.digest
        for below in self._branches.values():
            for name, mark in below.items():
                yield _nat(name), mark.digest
        for written in self._ports.values():
            for name, digest in zip(written.chains, written.digests, strict=True):
                yield _nat(name), digest

    def first_draft(
        self, rendered: Mapping[PortName, PortRules], options: RuleOptions, jumps: Rules, live: Ruleset
    ) -> Draft:
        """All there is to do for the tables to hold the rules of exactly these service ports.

        Chains of services that nobody wants are to go; those that somebody else's rules refer to can only be emptied.
        The jumps of the kernel's chains are put in order.
        """
        trees = self._trees(skeleton.SHARED, rendered, (), jumps, options)
        branches = {chain for tree in trees.values() for chain, _ in tree.chains}

        def stale(ports: Mapping[PortName, Written | None]) -> Iterator[str]:
            if self._adopted:
                wanted = branches.union(*(written.chains for written in ports.values() if written))
                yield from (chain for chain in self._adopted if chain not in wanted)

        return self._draft(rendered, (), jumps, options, trees, stale, ensured_lines(live, options))

    def draft(
        self,
        rendered: Mapping[PortName, PortRules],
        gone: Iterable[PortName],
        options: RuleOptions,
        jumps: Rules,
        ensured: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Draft:
        """What follows from new rules for some service ports and from others being gone; all else stays.

        `ensured` are lines as in a Change.
        """
        gone = frozenset(gone)
        trees = self._trees(self._touched(rendered, gone, jumps), rendered, gone, jumps, options)

        def stale(ports: Mapping[PortName, Written | None]) -> Iterator[str]:
            return itertools.chain(self._unused(ports), self._unused_branches(trees))

        return self._draft(rendered, gone, jumps, options, trees, stale, ensured or {})

    def _draft(
        self,
        rendered: Mapping[PortName, PortRules],
        gone: Collection[PortName],
        jumps: Rules,
        options: RuleOptions,
        trees: Mapping[ChainKey, Tree],
        stale: Callable[[Mapping[PortName, Written | None]], Iterator[str]],
        ensured: Mapping[str, tuple[str, ...]],
    ) -> Draft:
        fixed = self._differing(itertools.starmap(Chain, skeleton.fixed_chains(options).items()))
        shared = self._differing(Chain(key, tree.root) for key, tree in trees.items())
        ports: dict[PortName, Written | None] = dict.fromkeys(gone)
        tally = Tally()

        def services() -> Iterator[tuple[Chain, ...]]:
            tally.chains = 0
            tally.rules.clear()
            tally.count((*fixed, *shared))
            for group in self._services(rendered, ports):
                tally.count(group)
                yield group
            # Branches lead to services, and to one another from the last to the first.
            branches = (Chain(_nat(name), rules) for tree in trees.values() for name, rules in tree.chains)
            emptied = (Chain(_nat(chain), ()) for chain in stale(ports) if chain in self._referred)
            for chain in self._differing(itertools.chain(branches, emptied)):
                tally.count([chain])
                yield (chain,)

        change = Change(
            fixed=fixed,
            services=Again(services),
            shared=shared,
            before=self._filter,
            stale=Again(lambda: (chain for chain in stale(ports) if chain not in self._referred)),
            ensured=ensured,
        )
        below = {key: {name: Mark.of(rules) for name, rules in tree.chains} for key, tree in trees.items()}
        return Draft(change, ports, tally, jumps, below)

    def commit(self, draft: Draft) -> None:
        """The draft's change is in force now."""
        for key, rules in (*draft.change.fixed, *draft.change.shared):
            self._common[key] = Mark.of(rules)
            if key.table == "filter" and key in skeleton.SHARED:
                self._filter[key] = rules
        self._adopted = {}
        self._doubted = set()
        self._jumps = draft.jumps
        self._branches.update(draft.branches)
        for name, written in draft.ports.items():
            if written is None:
                self._ports.pop(name, None)
            else:
                self._ports[name] = written

    def _services(
        self, rendered: Mapping[PortName, PortRules], ports: dict[PortName, Written | None]
    ) -> Iterator[tuple[Chain, ...]]:
        """The chains of single services that differ from what is there, grouped by Service; all are noted in `ports`."""

        def service(name: PortName) -> Key:
            return name.service_key

        for _, group in itertools.groupby(sorted(rendered), key=service):
            different: list[Chain] = []
            for name in group:
                chains = tuple(rendered[name].chains)
                before = self._ports.get(name)
                known = before.known() if before else self._adopted
                after = ports[name] = Written.of(chains, rendered[name].entries)
                different += (
                    Chain(_nat(chain), rules)
                    for (chain, rules), digest in zip(chains, after.digests, strict=True)
                    if known.get(chain) != digest
                )
            if different:
                yield tuple(different)

    def _touched(
        self, rendered: Mapping[PortName, PortRules], gone: Iterable[PortName], jumps: Rules
    ) -> set[ChainKey]:
        """The shared chains in which some service port's entries change."""
        touched = set(self._doubted)
        if jumps != self._jumps:
            touched.add(skeleton.NAT_SERVICES)
        for name in itertools.chain(rendered, gone):
            before = self._ports.get(name)
            after = rendered[name].entries if name in rendered else ()
            touched |= {key for key, _ in set(before.entries if before else ()) ^ set(after)}
        return touched

    def _trees(
        self,
        keys: Collection[ChainKey],
        rendered: Mapping[PortName, PortRules],
        gone: Collection[PortName],
        jumps: Rules,
        options: RuleOptions,
    ) -> dict[ChainKey, Tree]:
        """Those of the shared chains that are asked for, as they are to be, with the chains below them."""
        if not keys:
            return {}
        after: dict[PortName, Written | PortRules] = {**self._ports, **rendered}
        entries = [after[name].entries for name in sorted(after) if name not in gone]
        return {
            key: shared_chain(key, entries, jumps, options.dispatch) for key in skeleton.SHARED if key in keys
        }

    def _unused(self, updates: Mapping[PortName, Written | None]) -> Iterable[str]:
        """The chains that these service ports had and no longer have."""
        for name, written in updates.items():
            before = self._ports.get(name)
            if before and before.names != (written.names if written else ""):
                yield from sorted(set(before.chains).difference(written.chains if written else ()))

    def _unused_branches(self, trees: Mapping[ChainKey, Tree]) -> Iterable[str]:
        """The chains that were below these shared chains and no longer are."""
        for key, tree in trees.items():
            yield from sorted(self._branches.get(key, {}).keys() - {name for name, _ in tree.chains})

    def _differing(self, chains: Iterable[Chain]) -> tuple[Chain, ...]:
        return tuple(chain for chain in chains if self._differs(chain))

    def _differs(self, chain: Chain) -> bool:
        """Whether a chain that is no single service port's is to be written."""
        known = self._common.get(chain.key)
        for below in self._branches.values():
            known = known or below.get(chain.key.chain)
        digest = known.digest if known else self._adopted.get(chain.key.chain)
        return digest != hash(chain.rules)


def _nat(chain: str) -> ChainKey:
    return ChainKey("nat", chain)
