"""What the kernel holds of ours, as far as we know, and what has to change for it to hold something else."""

import itertools
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

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


class Mark(NamedTuple):
    """What is kept of a chain that no single service port owns: the hash of its rules, and how many there are."""

    digest: int
    rules: int


class Written(msgspec.Struct, frozen=True):
    """What is kept of a service port's rules.

    `names` are those of its own chains with spaces between, as one text takes a third of what many take. `digests` are
    what their rules hash to, `rules` how many there are in them. `entries` are its rules in chains that services share.
    """

    names: str
    digests: "array[int]"
    rules: int
    entries: Entries

    @property
    def chains(self) -> list[str]:
        """The names of its own chains."""
        return self.names.split()

    def known(self) -> dict[str, int]:
        """The digest of each chain."""
        return dict(zip(self.chains, self.digests, strict=True))


class Draft(msgspec.Struct, frozen=True):
    """A step from what the kernel holds to what it ought to hold: taken over by `commit` once it is in force."""

    change: Change
    ports: Mapping[PortName, Written | None]
    jumps: Rules
    branches: Mapping[ChainKey, Mapping[str, Mark]]


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
        self._common = {key: _mark(rules) for key, rules in ours.items() if not names.is_owned(key.chain)}
        self._filter = {key: ours[key] for key in skeleton.SHARED if key in ours and key.table == "filter"}
        self._ports: dict[PortName, Written] = {}
        self._referred = frozenset(key.chain for key in referred_to_by_others(live) if key.table == "nat")
        self._jumps: Rules = ()
        # The chains below a shared one that is a tree.
        self._branches: dict[ChainKey, Mapping[str, Mark]] = {}

    def rules(self) -> Mapping[str, int]:
        """How many rules of ours each table holds."""
        count = Counter({"nat": sum(written.rules for written in self._ports.values())})
        for key, mark in self._common.items():
            count[key.table] += mark.rules
        count["nat"] += sum(mark.rules for below in self._branches.values() for mark in below.values())
        return count

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
        stale = (chain for chain in self._adopted if chain not in wanted)
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
        branches = (Chain(_nat(name), rules) for tree in trees.values() for name, rules in tree.chains)
        emptied = (Chain(_nat(chain), ()) for chain in stale if chain in self._referred)
        single = ((chain,) for chain in itertools.chain(branches, emptied) if self._differs(chain))
        change = Change(
            fixed=tuple(chain for chain in fixed if self._differs(chain)),
            services=(*self._services(rendered, updates), *single),
            shared=tuple(chain for chain in shared if self._differs(chain)),
            before=self._filter,
            stale=tuple(chain for chain in stale if chain not in self._referred),
            ensured=ensured,
        )
        below = {key: {name: _mark(rules) for name, rules in tree.chains} for key, tree in trees.items()}
        return Draft(change, updates, jumps, below)

    def commit(self, draft: Draft) -> None:
        """The draft's change is in force now."""
        for key, rules in draft.change.chains():
            if not names.is_owned(key.chain):
                self._common[key] = _mark(rules)
            if key.table == "filter" and key in skeleton.SHARED:
                self._filter[key] = rules
        self._adopted = {}
        self._jumps = draft.jumps
        self._branches.update(draft.branches)
        for name, written in draft.ports.items():
            if written is None:
                self._ports.pop(name, None)
            else:
                self._ports[name] = written

    def _services(
        self, rendered: Mapping[PortName, PortRules], updates: Mapping[PortName, Written | None]
    ) -> Iterable[tuple[Chain, ...]]:
        """The chains of single services that differ from what is there, grouped by Service."""

        def service(name: PortName) -> Key:
            return name.service_key

        for _, group in itertools.groupby(sorted(rendered), key=service):
            different: list[Chain] = []
            for name in group:
                before = self._ports.get(name)
                known = before.known() if before else self._adopted
                if (after := updates[name]) is not None:
                    different += (
                        Chain(_nat(chain), rules)
                        for (chain, rules), digest in zip(rendered[name].chains, after.digests, strict=True)
                        if known.get(chain) != digest
                    )
            if different:
                yield tuple(different)

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
            if before and before.names != (written.names if written else ""):
                yield from sorted(set(before.chains).difference(written.chains if written else ()))

    def _unused_branches(self, trees: Mapping[ChainKey, Tree]) -> Iterable[str]:
        """The chains that were below these shared chains and no longer are."""
        for key, tree in trees.items():
            yield from sorted(self._branches.get(key, {}).keys() - {name for name, _ in tree.chains})

    def _differs(self, chain: Chain) -> bool:
        """Whether a chain that is no single service port's is to be written."""
        known = self._common.get(chain.key)
        for below in self._branches.values():
            known = known or below.get(chain.key.chain)
        digest = known.digest if known else self._adopted.get(chain.key.chain)
        return digest != hash(chain.rules)


def _nat(chain: str) -> ChainKey:
    return ChainKey("nat", chain)


def _mark(rules: Rules) -> Mark:
    return Mark(hash(rules), len(rules))


def _updates(
    rendered: Mapping[PortName, PortRules], gone: Iterable[PortName]
) -> dict[PortName, Written | None]:
    return {**dict.fromkeys(gone), **{name: _written(rules) for name, rules in rendered.items()}}


def _written(rules: PortRules) -> Written:
    return Written(
        names=" ".join(chain for chain, _ in rules.chains),
        digests=array("q", (hash(of) for _, of in rules.chains)),
        rules=sum(len(of) for _, of in rules.chains),
        entries=rules.entries,
    )


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
