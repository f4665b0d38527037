"""The rules that concern some services, as iptables-save prints them and in the order a packet meets them."""

from collections.abc import Iterable, Mapping

from pykubeproxy.inspect.dump import Service, find
from pykubeproxy.inspect.frontends import RuleAt
from pykubeproxy.inspect.routes import chains_from
from pykubeproxy.inspect.rule import read
from pykubeproxy.inspect.wanted import Wanted
from pykubeproxy.rules import names, skeleton
from pykubeproxy.rules.ownership import is_ours
from pykubeproxy.rules.ruleset import ChainKey, Ruleset
from pykubeproxy.services.ports import PortName

_MARKING = ChainKey("nat", names.MARK_MASQ)
_MASQUERADING = ChainKey("nat", names.POSTROUTING)
_ENTRANCES = tuple(ChainKey("nat", chain) for chain in ("PREROUTING", "OUTPUT"))
_EXITS = (ChainKey("nat", "POSTROUTING"),)
_FILTERING = tuple(ChainKey("filter", chain) for chain in ("INPUT", "FORWARD", "OUTPUT"))
_FILTERS = (
    skeleton.FILTER_FIREWALL,
    skeleton.FILTER_NODEPORTS,
    skeleton.FILTER_SERVICES,
    skeleton.FILTER_EXTERNAL,
)
# The chains, besides those below nat KUBE-SERVICES, that a listing may have rules of.
AROUND = (_MASQUERADING, *_ENTRANCES, *_EXITS, *_FILTERING, *_FILTERS)


def listing(ruleset: Ruleset, wanted: Wanted) -> str:
    """The rules of the wanted services; empty if there are none.

    First table nat, where a packet comes in, gets a mark if it is to be masqueraded, and a destination; then filter;
    then nat again, where it leaves.
    """
    services = find(ruleset, wanted)
    if not services:
        return ""
    own = _own_chains(ruleset, services)
    shared = _shared_rules(services)
    filters = {key: _about(ruleset, key, services) for key in _FILTERS}
    last = {key: ruleset.chains[key] for key in (_MASQUERADING,) if _MARKING in own and key in ruleset.chains}
    sections = (
        ("nat", {**_jumps(ruleset, _ENTRANCES, shared), **_texts(ruleset, shared), **own}),
        ("filter", {**_jumps(ruleset, _FILTERING, {k for k in filters if filters[k]}), **filters}),
        ("nat", {**_jumps(ruleset, _EXITS, last), **last}),
    )
    return "".join(_section(table, rules) for table, rules in sections)


def _own_chains(ruleset: Ruleset, services: Mapping[PortName, Service]) -> dict[ChainKey, tuple[str, ...]]:
    """The services' own chains, each after those that jump to it; last the one that marks packets."""
    chains: dict[ChainKey, tuple[str, ...]] = {}
    for service in services.values():
        # The chains for external traffic lead to the others, so they come first.
        targets = sorted({found.target for found in service.served}, key=_by_kind)
        chains.update((key, ruleset.chains[key]) for key in chains_from(ruleset, *targets))
    if _MARKING in chains:
        chains[_MARKING] = chains.pop(_MARKING)
    return chains


def _by_kind(chain: str) -> int:
    kinds = (names.FIREWALL_PREFIX, names.EXTERNAL_PREFIX)
    return next((i for i, prefix in enumerate(kinds) if chain.startswith(prefix)), len(kinds))


def _shared_rules(services: Mapping[PortName, Service]) -> dict[ChainKey, set[int]]:
    """The positions, in the chains of table nat that services share, of the rules on the way to these services."""
    rules: dict[ChainKey, set[int]] = {}
    for service in services.values():
        for found in service.served:
            for at in found.path:
                rules.setdefault(at.key, set()).add(at.position)
    return rules


def _texts(ruleset: Ruleset, rules: Mapping[ChainKey, set[int]]) -> dict[ChainKey, tuple[str, ...]]:
    return {
        key: tuple(ruleset.chains[key][position] for position in sorted(positions))
        for key, positions in rules.items()
        if key in ruleset.chains
    }


def _about(ruleset: Ruleset, key: ChainKey, services: Mapping[PortName, Service]) -> tuple[str, ...]:
    """The rules of a shared chain of table filter that are about these services."""
    refusing: set[RuleAt] = {at for s in services.values() for found in s.refused for at in found.path}
    titles = set(map(str, services))
    return tuple(
        text
        for position, text in enumerate(ruleset.chains.get(key, ()))
        if RuleAt(key, position) in refusing or read(text).comment.partition(" ")[0] in titles
    )


def _jumps(
    ruleset: Ruleset, chains: Iterable[ChainKey], targets: Iterable[ChainKey]
) -> dict[ChainKey, tuple[str, ...]]:
    """The rules of the kernel's own chains that lead to chains of ours."""
    wanted = {key.chain for key in targets if is_ours(key)}
    return {
        key: tuple(text for text in ruleset.chains.get(key, ()) if read(text).target in wanted)
        for key in chains
    }


def _section(table: str, chains: Mapping[ChainKey, tuple[str, ...]]) -> str:
    lines = [f"-A {key.chain} {rule}".rstrip() for key, rules in chains.items() for rule in rules]
    return "\n".join((f"*{table}", *lines, "")) if lines else ""
