"""A step from what the kernel holds of ours to something else, and what is kept of the chains that it writes."""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.rules.plan import Chain, Change, Rules
from pykubeproxy.rules.ruleset import ChainKey
from pykubeproxy.rules.service import Entries
from pykubeproxy.services.ports import PortName


class Mark(NamedTuple):
    """What is kept of a chain that no single service port owns: the hash of its rules, and how many there are."""

    digest: int
    rules: int

    @classmethod
    def of(cls, rules: Rules) -> "Mark":
        """What to keep of these rules."""
        return cls(hash(rules), len(rules))


class Written(msgspec.Struct, frozen=True):
    """What is kept of a service port's rules.

    `names` are those of its own chains with spaces between, as one text takes a third of what many take. `digests` are
    what their rules hash to, `rules` how many there are in them. `entries` are its rules in chains that services share.
    """

    names: str
    digests: "array[int]"
    rules: int
    entries: Entries

    @classmethod
    def of(cls, chains: Collection[tuple[str, Rules]], entries: Entries) -> "Written":
        """What to keep of these chains and entries."""
        return cls(
            names=" ".join(chain for chain, _ in chains),
            digests=array("q", (hash(rules) for _, rules in chains)),
            rules=sum(len(rules) for _, rules in chains),
            entries=entries,
        )

    @property
    def chains(self) -> list[str]:
        """The names of its own chains."""
        return self.names.split()

    def known(self) -> dict[str, int]:
        """The digest of each chain."""
        return dict(zip(self.chains, self.digests, strict=True))


class Tally(msgspec.Struct):
    """How many chains are written, and how many rules in each table."""

    chains: int = 0
    rules: Counter[str] = msgspec.field(default_factory=Counter)

    def count(self, chains: Iterable[Chain]) -> None:
        """Add some chains."""
        for chain in chains:
            self.chains += 1
            self.rules[chain.key.table] += len(chain.rules)


class Draft(msgspec.Struct, frozen=True):
    """A step from what the kernel holds to what it ought to hold: taken over by `commit` once it is in force.

    A service's chains are rendered when they are read in `change`, so that iptables-restore need not wait for the last
    of them, nor memory hold them all. `ports` and `tally` are complete once `change` has been read to its end.
    """

    change: Change
    ports: Mapping[PortName, Written | None]
    tally: Tally
    jumps: Rules
    branches: Mapping[ChainKey, Mapping[str, Mark]]
