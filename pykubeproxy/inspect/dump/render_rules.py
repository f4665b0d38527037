"""Rules as text: those of services in the order in which a packet meets them, or all rules of a node."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import msgspec

from pykubeproxy.inspect.dump.model import FrontendRules, find_ports
from pykubeproxy.inspect.node import NodeRules
from pykubeproxy.inspect.routes import RulePosition, chains_from, filter_rules
from pykubeproxy.inspect.targets import ServiceFilter
from pykubeproxy.objects import Family
from pykubeproxy.report.document import Report
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.iptables_save import parse_rule
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import PortName

_MARK_MASQ = ChainKey("nat", names.MARK_MASQ)
_POSTROUTING = ChainKey("nat", names.POSTROUTING)
_NAT_IN = tuple(ChainKey("nat", chain) for chain in ("PREROUTING", "OUTPUT"))
_NAT_OUT = (ChainKey("nat", "POSTROUTING"),)
_FILTER = tuple(ChainKey("filter", chain) for chain in ("INPUT", "FORWARD", "OUTPUT"))
_FILTER_SHARED = (
    skeleton.FILTER_FIREWALL,
    skeleton.FILTER_NODEPORTS,
    skeleton.FILTER_SERVICES,
    skeleton.FILTER_EXTERNAL,
)
# The chains a listing may need besides shared ones and those below them.
OTHER_CHAINS = (_POSTROUTING, *_NAT_IN, *_NAT_OUT, *_FILTER)

_Rules = Mapping[ChainKey, tuple[str, ...]]


class RenderedChain(msgspec.Struct, frozen=True, rename="camel"):
    """A chain with its rules.

    - `rules`: as iptables-save prints them after "-A CHAIN "
    """

    chain: str
    rules: Sequence[str]


class RenderedTable(msgspec.Struct, frozen=True, rename="camel"):
    """What the agent writes into a table of iptables.

    - `chains`: in the order of writing; built-in chains with the jumps from them
    """

    table: str
    chains: Sequence[RenderedChain]


class RenderedFamily(msgspec.Struct, frozen=True, rename="camel"):
    """The rules of one family.

    - `tables`: in the order of writing
    """

    family: Family
    tables: Sequence[RenderedTable]


class RenderReport(Report, frozen=True, kw_only=True):
    """The rules for the objects of a node.

    - `node`: its name; null if the objects do not tell it
    """

    node: str | None
    families: Sequence[RenderedFamily]

    @classmethod
    def of(cls, rulesets: Iterable[Ruleset], node_name: str) -> Self:
        """Return the report of the rules of both families."""
        return cls(
            node=node_name or None,
            families=[
                RenderedFamily(
                    ruleset.family,
                    [
                        RenderedTable(table, [RenderedChain(*chain) for chain in ruleset.of_table(table)])
                        for table in ruleset.tables()
                    ],
                )
                for ruleset in rulesets
            ],
        )


def node_listing(rules: NodeRules, filter_: ServiceFilter) -> str:
    """Return the rules of the matching services that a proxy of any mode wrote; "" if there are none."""
    if not rules.nftables or not rules.in_nftables_mode:
        return listing(rules.ruleset, filter_)
    from pykubeproxy.inspect.dump.nftables import nft_listing  # few nodes have such rules

    return nft_listing(rules.nftables, filter_)


def listing(ruleset: Ruleset, filter_: ServiceFilter) -> str:
    """Return the rules of the matching services; "" if there are none.

    Table nat comes first with marks and DNAT, then filter, then nat again with masquerading.
    """
    ports = find_ports(ruleset, filter_)
    if not ports:
        return ""
    own = _own_chains(ruleset, ports)
    shared = _at(ruleset, (at for port in ports.values() for rule in port.serving for at in rule.path))
    filters = _at(ruleset, _filter_positions(ruleset, ports))
    last = {
        key: ruleset.chains[key] for key in (_POSTROUTING,) if _MARK_MASQ in own and key in ruleset.chains
    }
    sections: tuple[tuple[str, _Rules], ...] = (
        ("nat", {**_jumps(ruleset, _NAT_IN, shared), **shared, **own}),
        ("filter", {**_jumps(ruleset, _FILTER, filters), **filters}),
        ("nat", {**_jumps(ruleset, _NAT_OUT, last), **last}),
    )
    return "".join(_section(table, rules) for table, rules in sections)


def _own_chains(ruleset: Ruleset, ports: Mapping[PortName, FrontendRules]) -> dict[ChainKey, tuple[str, ...]]:
    """Return the services' own chains, each after those that jump to it; KUBE-MARK-MASQ is the last."""
    chains: dict[ChainKey, tuple[str, ...]] = {}
    for port in ports.values():
        targets = sorted({rule.target for rule in port.serving}, key=_depth)
        chains.update((key, ruleset.chains[key]) for key in chains_from(ruleset, *targets))
    if _MARK_MASQ in chains:
        chains[_MARK_MASQ] = chains.pop(_MARK_MASQ)
    return chains


def _depth(chain: str) -> int:
    """Sort chains for external traffic before the chains they lead to."""
    prefixes = (names.FIREWALL_PREFIX, names.EXTERNAL_PREFIX)
    return next((i for i, prefix in enumerate(prefixes) if chain.startswith(prefix)), len(prefixes))


def _at(ruleset: Ruleset, found: Iterable[RulePosition]) -> _Rules:
    """Return the rules at these positions."""
    positions: dict[ChainKey, set[int]] = {}
    for key, position in found:
        positions.setdefault(key, set()).add(position)
    return {
        key: tuple(ruleset.chains[key][position] for position in sorted(some))
        for key, some in positions.items()
    }


def _filter_positions(ruleset: Ruleset, ports: Mapping[PortName, FrontendRules]) -> Iterator[RulePosition]:
    """Yield the positions of these services' rules in table filter, and of the jumps to them."""
    rejecting = {rule.path for port in ports.values() for rule in port.rejecting}
    titles = set(map(str, ports))
    for key in _FILTER_SHARED:
        for path, rule in filter_rules(ruleset, key):
            if path in rejecting or rule.title in titles:
                yield from path


def _jumps(ruleset: Ruleset, chains: Iterable[ChainKey], targets: Iterable[ChainKey]) -> _Rules:
    """Return the rules of built-in chains that jump to our chains."""
    ours = {key.chain for key in targets if is_ours(key)}
    return {
        key: tuple(text for text in ruleset.chains.get(key, ()) if parse_rule(text).target in ours)
        for key in chains
    }


def _section(table: str, chains: _Rules) -> str:
    lines = [f"-A {key.chain} {rule}".rstrip() for key, rules in chains.items() for rule in rules]
    return "\n".join((f"*{table}", *lines, "")) if lines else ""
