"""What the kernel holds of ours, as far as we know, and what has to change for it to hold something else."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from pykubeproxy.objects import Key
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.dispatch import shared_chain
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ownership import is_ours, referred_to_by_others
from pykubeproxy.rules.plan import Chain, Change, Rules, missing_lines
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.rules.service import Entries, PortRules
from pykubeproxy.rules.tree import Tree
from pykubeproxy.services.ports import PortName

# The part of a digest that is the number of rules.
_LENGTH = (1 << 24) - 1


class Written(msgspec.Struct, frozen=True):
    """What is kept of a service port's rules: the names of its own chains, and its entries in shared ones."""

    chains: tuple[str, ...]
    entries: Entries


class Draft(msgspec.Struct, frozen=True):
    """A step from what the kernel holds to what it ought to hold: taken over by `commit` once it is in force."""

    change: Change
    ports: Mapping[PortName, Written | None]
    jumps: Rules
    branches: Mapping[ChainKey, tuple[str, ...]]


class Programmed:
    """The chains of ours in one family's tables: a digest for each, and which service port they belong to.

    Digests are Python's hash() of the rules: keyed anew in every process, and never leaving it. Rules as such are kept
    only of shared chains, which are made of many service ports' entries.
    """

    def __init__(self, live: Ruleset) -> None:
        """Start from live tables, whoever wrote them: what is already as it should be need not be written."""
        self._digests = {key: _digest(rules) for key, rules in live.chains.items() if is_ours(key)}
        self._rules = Counter[str]()
        for key, digest in self._digests.items():
            self._rules[key.table] += digest & _LENGTH
        self._filter = {
            key: live.chains[key] for key in skeleton.SHARED if key in live.chains and key.table == "filter"
        }
        self._ports: dict[PortName, Written] = {}
        self._referred = frozenset(key.chain for key in referred_to_by_others(live) if key.table == "nat")
        self._jumps: Rules = ()
        # The chains below a shared one that is a tree.
        self._branches: dict[ChainKey, tuple[str, ...]] = {}

    def rules(self) -> Mapping[str, int]:
        """How many rules of ours each table holds."""
        return dict(self._rules)

    def port_of(self, chain: str) -> PortName | None:
        """The service port that a chain of table nat belongs to."""
        return next((name for name, written in self._ports.items() if chain in written.chains), None)

    def first_draft(
        self, rendered: Mapping[PortName, PortRules], options: RuleOptions, jumps: Rules, live: Ruleset
    ) -> Draft:
        """All there is to do for the tables to hold the rules of exactly these service ports.

        Chains of services that nobody wants are to go; those that somebody else's rules refer to can only be emptied.
        The jumps of the kernel's chains are put in order.
        """
        updates = _updates(rendered, ())
        trees = self._trees(skeleton.SHARED, updates, jumps, options)
        wanted = {chain for rules in rendered.values() for chain, _ in rules.chains}
        wanted.update(chain for tree in trees.values() for chain, _ in tree.chains)
        owned = (key.chain for key in self._digests if names.is_owned(key.chain))
        stale = (chain for chain in owned if chain not in wanted)
        return self._draft(rendered, updates, jumps, options, trees, stale, _ensured(live, options))

    def draft(
        self,
        rendered: Mapping[PortName, PortRules],
        gone: Iterable[PortName],
        options: RuleOptions,
        jumps: Rules,
    ) -> Draft:
        """What follows from new rules for some service ports and from others being gone; all else stays."""
        updates = _updates(rendered, gone)
        trees = self._trees(self._touched(updates, jumps), updates, jumps, options)
        stale = itertools.chain(self._unused(updates), self._unused_branches(trees))
        return self._draft(rendered, updates, jumps, options, trees, stale, {})

    def _draft(
        self,
        rendered: Mapping[PortName, PortRules],
        updates: Mapping[PortName, Written | None],
        jumps: Rules,
        options: RuleOptions,
        trees: Mapping[ChainKey, Tree],
        stale: Iterable[str],
        ensured: Mapping[str, tuple[str, ...]],
    ) -> Draft:
        stale = tuple(stale)
        fixed = (Chain(key, rules) for key, rules in skeleton.fixed_chains(options).items())
        shared = (Chain(key, tree.root) for key, tree in trees.items())
        # Branches lead to services, and to one another from the last to the first.
        branches = (
            Chain(ChainKey("nat", name), rules) for tree in trees.values() for name, rules in tree.chains
        )
        emptied = (Chain(ChainKey("nat", chain), ()) for chain in stale if chain in self._referred)
        single = ((chain,) for chain in itertools.chain(branches, emptied) if self._differs(chain))
        change = Change(
            fixed=tuple(chain for chain in fixed if self._differs(chain)),
            services=(*self._services(rendered), *single),
            shared=tuple(chain for chain in shared if self._differs(chain)),
            before=self._filter,
            stale=tuple(chain for chain in stale if chain not in self._referred),
            ensured=ensured,
        )
        below = {key: tuple(name for name, _ in tree.chains) for key, tree in trees.items()}
        return Draft(change, updates, jumps, below)

    def commit(self, draft: Draft) -> None:
        """The draft's change is in force now."""
        change = draft.change
        for key, rules in change.chains():
            self._rules[key.table] += len(rules) - (self._digests.get(key, 0) & _LENGTH)
            self._digests[key] = _digest(rules)
            if key in self._filter or (key.table == "filter" and key in skeleton.SHARED):
                self._filter[key] = rules
        for chain in change.stale:
            self._rules["nat"] -= self._digests.pop(ChainKey("nat", chain), 0) & _LENGTH
        self._jumps = draft.jumps
        self._branches.update(draft.branches)
        for name, written in draft.ports.items():
            if written is None:
                self._ports.pop(name, None)
            else:
                self._ports[name] = written

    def _services(self, rendered: Mapping[PortName, PortRules]) -> Iterable[tuple[Chain, ...]]:
        """The chains of single services that differ from what is there, grouped by Service."""

        def service(name: PortName) -> Key:
            return name.service_key

        for _, group in itertools.groupby(sorted(rendered), key=service):
            chains = [
                Chain(ChainKey("nat", c), rules) for name in group for c, rules in rendered[name].chains
            ]
            if different := tuple(chain for chain in chains if self._differs(chain)):
                yield different

    def _touched(self, updates: Mapping[PortName, Written | None], jumps: Rules) -> set[ChainKey]:
        """The shared chains in which some service port's entries change."""
        touched = {skeleton.NAT_SERVICES} if jumps != self._jumps else set()
        for name, written in updates.items():
            before = self._ports.get(name)
            changed = set(before.entries if before else ()) ^ set(written.entries if written else ())
            touched |= {key for key, _ in changed}
        return touched

    def _trees(
        self,
        keys: Collection[ChainKey],
        updates: Mapping[PortName, Written | None],
        jumps: Rules,
        options: RuleOptions,
    ) -> dict[ChainKey, Tree]:
        """Those of the shared chains that are asked for, as they are to be, with the chains below them."""
        if not keys:
            return {}
        after = {**self._ports, **updates}
        entries = [written.entries for name in sorted(after) if (written := after[name])]
        return {
            key: shared_chain(key, entries, jumps, options.dispatch) for key in skeleton.SHARED if key in keys
        }

    def _unused(self, updates: Mapping[PortName, Written | None]) -> Iterable[str]:
        """The chains that these service ports had and no longer have."""
        for name, written in updates.items():
            before = self._ports.get(name)
            still = written.chains if written else ()
            if before and before.chains != still:
                yield from sorted(set(before.chains).difference(still))

    def _unused_branches(self, trees: Mapping[ChainKey, Tree]) -> Iterable[str]:
        """The chains that were below these shared chains and no longer are."""
        for key, tree in trees.items():
            yield from sorted(set(self._branches.get(key, ())).difference(name for name, _ in tree.chains))

    def _differs(self, chain: Chain) -> bool:
        return self._digests.get(chain.key) != _digest(chain.rules)


def _digest(rules: Rules) -> int:
    return hash(rules) << 24 | len(rules)


def _updates(
    rendered: Mapping[PortName, PortRules], gone: Iterable[PortName]
) -> dict[PortName, Written | None]:
    written = {
        name: Written(tuple(chain for chain, _ in rules.chains), rules.entries)
        for name, rules in rendered.items()
    }
    return {**dict.fromkeys(gone), **written}


def _ensured(live: Ruleset, options: RuleOptions) -> dict[str, tuple[str, ...]]:
    """Lines for what has to stand in chains that are not ours alone: our jumps, and the kubelet's chain."""
    lines: dict[str, tuple[str, ...]] = {}
    kubelets = live.chains.get(skeleton.KUBELET_FIREWALL)
    if kubelets is None:
        lines["filter"] = (f"-N {names.KUBELET_FIREWALL}",)
    for rule in skeleton.kubelet_firewall(options):
        if rule not in (kubelets or ()):
            lines["filter"] = (*lines.get("filter", ()), f"-A {names.KUBELET_FIREWALL} {rule}")
    for key, jumps in missing_lines(live, skeleton.JUMPS).items():
        lines[key.table] = (*lines.get(key.table, ()), *jumps)
    return lines
