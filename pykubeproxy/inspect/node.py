"""The state of a node: what all questions are asked of, wherever it was read.

Sources of nodes (`pykubeproxy/nodes/`) make these values; `inspect/` knows no source.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from pykubeproxy.config import Config
from pykubeproxy.inspect.flows import FlowTable
from pykubeproxy.inspect.packets.packet import NodeNetwork
from pykubeproxy.inspect.packets.rule_set import RuleSet
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.rules.context import KernelFacts
from pykubeproxy.rules.names import NFT_TABLES
from pykubeproxy.rules.nft_list import NftRuleset
from pykubeproxy.rules.ruleset import Counters, Ruleset
from pykubeproxy.wording import listed

_MOST_NAMED = 3
# The key of the tables of nftables in `NodeState.unread`.
UNREAD_NFTABLES = "nftables"


def unread_rules(family: Family) -> str:
    """Return the key of a family's rules in `NodeState.unread`."""
    return f"{family.value} rules"


class Origin(msgspec.Struct, frozen=True):
    """Where the state of a node was read.

    - `title`: the rules, as one side of a comparison: "live rules (nft)"
    - `place`: the same in a sentence: "in the nft tables of this node"
    - `proxy`: the proxy that wrote the rules, such as "kube-proxy v1.35.1"; "" if unknown
    - `pod`: NAMESPACE/NAME of the pod in which the rules were read, or ""
    - `made`: when, in seconds since 1970; None for now
    """

    title: str
    place: str = ""
    proxy: str = ""
    pod: str = ""
    made: float | None = None


class NodeRules(msgspec.Struct, frozen=True):
    """The rules of one family on a node.

    - `counters`: of the rules, if they were asked for
    - `backend`: "nft" or "legacy", "" if unknown
    - `facts`: about the kernel, on which desired rules depend; None if they must be inferred from the rules
    - `nftables`: the tables of nftables, of a service proxy or of others, if they were asked for
    """

    ruleset: Ruleset
    counters: Counters = {}
    backend: str = ""
    facts: KernelFacts | None = None
    nftables: NftRuleset | None = None

    @property
    def in_nftables_mode(self) -> bool:
        """Whether a kube-proxy in nftables mode wrote rules."""
        return self.nftables is not None and any(table in NFT_TABLES for table in self.nftables.tables())

    @property
    def rule_sets(self) -> Sequence[RuleSet]:
        """The rules that packets meet."""
        from pykubeproxy.inspect.packets.iptables import IptablesRules  # most questions walk no packets

        iptables = IptablesRules(self.ruleset)
        if not self.nftables or not self.nftables.chains:
            return [iptables]
        from pykubeproxy.inspect.packets.nftables import NftRules  # most nodes have no such tables

        return [iptables, NftRules(self.nftables)]


class NodeState(msgspec.Struct, frozen=True):
    """The state of one node, as far as a question needs it.

    - `node`: its Node; one with only a name, "" if unknown, where the object is not known
    - `rules`: those of a service proxy, by family; chains of live rules may be read when they are needed
    - `network`: its addresses and routes
    - `config`: the configuration of its proxy; None if it must be inferred from the rules
    - `other_backend`: the other backend, if it has service-proxy rules too, so that packets pass both; else ""
    - `unread`: what could not be read, and why: "IPv6 rules": "ip6tables-save is missing"
    - `remarks`: sentences about what these rules do not show
    - `flows`: what its kernel remembers of connections; None if nobody asked
    - `conntrack_failures`: how many packets conntrack failed on since the start, as NodeView.failures; none if unknown
    """

    node: Node
    origin: Origin
    rules: Mapping[Family, NodeRules] = {}
    network: NodeNetwork = NodeNetwork()
    config: Config | None = None
    other_backend: str = ""
    unread: Mapping[str, str] = {}
    remarks: Sequence[str] = ()
    flows: FlowTable | None = None
    conntrack_failures: Mapping[str, int] = {}

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def in_nftables_mode(self) -> bool:
        """Whether its proxy is a kube-proxy in nftables mode."""
        return any(rules.in_nftables_mode for rules in self.rules.values())

    @property
    def complete(self) -> bool:
        """Whether no family of the node's addresses is unread."""
        return not any(unread_rules(family_of(address)) in self.unread for address in self.node.addresses)


class UnknownNode(msgspec.Struct, frozen=True):
    """A node whose rules could not be read.

    - `reason`: why, and what to do
    - `by_design`: no fault is the cause, as its proxy uses other rules or none
    - `mode`: that of its proxy, "ipvs", "nftables" or "kernelspace", or "" if unknown
    - `proxy`, `pod`: as in Origin
    """

    node: Node
    reason: str
    by_design: bool = False
    mode: str = ""
    proxy: str = ""
    pod: str = ""

    @property
    def name(self) -> str:
        return self.node.name


def nftables_remarks(rulesets: Iterable[NftRuleset]) -> Iterator[str]:
    """Yield sentences about what walks through these tables leave out."""
    found = dict.fromkeys(what for ruleset in rulesets for what in ruleset.not_evaluated)
    if found:
        yield f"packets may meet {listed(found, _MOST_NAMED)}, whose rules are not evaluated"


class Question(msgspec.Struct, frozen=True):
    """How much of the nodes to read.

    - `families`: of which rules
    - `service`: only this Service's chains are needed; an empty filter needs all
    - `counters`: with the counts of rules
    - `lazily`: a chain is read when a packet reaches it
    - `facts`: with facts about the kernel
    - `addresses`: the addresses of the node's interfaces matter to these facts
    - `nftables`: with the tables of a kube-proxy in nftables mode, whose node is unknown otherwise
    - `firewalls`: with the tables of nftables of other programs, too
    - `flows`: with what the kernel remembers of connections
    - `nodes`: the names of the nodes; empty for all of the source
    """

    families: tuple[Family, ...] = tuple(Family)
    service: ServiceFilter = ServiceFilter()
    counters: bool = False
    lazily: bool = False
    facts: bool = False
    addresses: bool = False
    nftables: bool = False
    firewalls: bool = False
    flows: bool = False
    nodes: Collection[str] = ()


class NodeSource(Protocol):
    """Where the state of nodes comes from: this node, files, a bundle, manifests, or a cluster."""

    def nodes(self, question: Question) -> Iterator[NodeState | UnknownNode]:
        """Yield the nodes as they have been read; one that cannot be read costs only its own answer.

        Raises ReadError if no node can be read.
        """


class ReadError(Exception):
    """A source cannot be read at all. str() is one line: what failed, on what, and what to do."""
