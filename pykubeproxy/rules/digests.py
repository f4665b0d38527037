"""The desired rules of service ports, and the digests that the applied state keeps instead of rules.

A digest is Python's hash() of a chain's rules. Its key differs in every process, so digests never leave the process.
In the chains of services, comments do not count: a large cluster omits some of them, and a chain keeps those it has until
another reason to write it.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from pykubeproxy.objects import Key
from pykubeproxy.rules import names
from pykubeproxy.rules.iptables_save import without_comment
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey, Entries, Rules
from pykubeproxy.rules.service import PortRules
from pykubeproxy.rules.text import Chain
from pykubeproxy.services.ports import PortName

# The digest of a missing chain; hash() never returns it.
ABSENT = -1
# iptables-legacy keeps a table as entries: one for a rule, two for a chain that is not built in.
CHAIN_ENTRIES = 2


def comparable(key: ChainKey, rules: Rules) -> Rules:
    """Return the rules of a chain without the comments that do not count."""
    if key.table != "nat" or not names.is_owned(key.chain):
        return rules
    return tuple([without_comment(rule) for rule in rules])


def digest(key: ChainKey, rules: Rules) -> int:
    """Return the digest of a chain."""
    return hash(comparable(key, rules))


class DesiredPort(NamedTuple):
    """The rules a service port should have, and how many endpoints it has.

    Endpoint chains of a `reduced` one stay as they are; its rules need no others.
    """

    name: PortName
    rules: PortRules
    endpoints: int
    reduced: bool = False

    @property
    def entries(self) -> Entries:
        """Return the rules in shared chains."""
        return self.rules.entries


class Desired(msgspec.Struct, frozen=True):
    """The rules that some Services should have; all others keep theirs.

    - `services`: the ports of each Service, by name; none for a Service that should have no rules
    - `shared`: shared chains to render even if no entry in them changes
    - `ensured`: lines for chains that others use too, such as `-I INPUT …`, by table
    - `most_deleted`: delete about this many unused chains, or as many as are written, the rest later; None means all
    """

    services: "Mapping[Key, tuple[DesiredPort | KeptPort, ...]]"
    options: RuleOptions
    node_port_jumps: Rules
    shared: frozenset[ChainKey] = frozenset()
    ensured: Mapping[str, tuple[str, ...]] = {}
    most_deleted: int | None = None


class AppliedPort(msgspec.Struct, frozen=True):
    """The applied rules of a service port, as digests.

    `names` are those of its own chains, separated by spaces: one text takes a third of the memory of many. `digests`
    are those of these chains, `sizes` are their numbers of rules, `entries` are its rules in shared chains.
    """

    name: PortName
    endpoints: int
    names: str
    digests: "array[int]"
    sizes: "array[int]"
    entries: Entries

    @classmethod
    def of(cls, port: DesiredPort, chains: Collection[tuple[str, Rules]]) -> "AppliedPort":
        """Return the digests of a port with these chains."""
        return cls(
            # A copy: the name itself lies between endpoints in memory, and would keep their pages from being freed.
            name=msgspec.structs.replace(port.name),
            endpoints=port.endpoints,
            names=" ".join(chain for chain, _ in chains),
            digests=array("q", [digest(ChainKey("nat", chain), rules) for chain, rules in chains]),
            sizes=array("I", [len(rules) for _, rules in chains]),
            entries=port.rules.entries,
        )

    def chains(self) -> "dict[str, AppliedChain]":
        """Return each own chain."""
        return dict(zip(self.names.split(), map(AppliedChain, self.digests, self.sizes), strict=True))

    def existing_chains(self) -> set[str]:
        """Return the own chains that the tables hold, with any rules."""
        return {name for name, kept in zip(self.names.split(), self.digests, strict=True) if kept != ABSENT}

    def holding(self, chains: "Mapping[str, AppliedChain]") -> "AppliedPort":
        """Return the port with these own chains."""
        return msgspec.structs.replace(
            self,
            names=" ".join(chains),
            digests=array("q", (chain.digest for chain in chains.values())),
            sizes=array("I", (chain.rules for chain in chains.values())),
        )


class KeptPort(NamedTuple):
    """A service port that keeps its entries in shared chains.

    `chains` are those of its own chains to write nevertheless, of endpoints and groups; `applied` contains them.
    """

    applied: AppliedPort
    chains: tuple[Chain, ...] = ()

    @property
    def name(self) -> PortName:
        return self.applied.name

    @property
    def endpoints(self) -> int:
        return self.applied.endpoints

    @property
    def entries(self) -> Entries:
        return self.applied.entries


class AppliedChain(NamedTuple):
    """An applied chain that no single service port owns, as a digest.

    `rules` is their number. `root` is the shared chain above a branch of a dispatch tree.
    """

    digest: int
    rules: int
    root: ChainKey | None = None

    @classmethod
    def of(cls, chain: Chain, root: ChainKey | None = None) -> "AppliedChain":
        """Return the applied chain of these rules."""
        return cls(digest(*chain), len(chain.rules), root)


MISSING_CHAIN = AppliedChain(ABSENT, 0)


class PortTotals(msgspec.Struct):
    """Running totals of the endpoints, chains and rules of all service ports."""

    endpoints: int = 0
    chains: int = 0
    rules: int = 0

    def add(self, ports: Iterable[AppliedPort], sign: int = 1) -> None:
        """Add ports."""
        for port in ports:
            self.endpoints += sign * port.endpoints
            self.chains += sign * len(port.digests)
            self.rules += sign * sum(port.sizes)

    def subtract(self, ports: Iterable[AppliedPort]) -> None:
        """Subtract ports."""
        self.add(ports, -1)
