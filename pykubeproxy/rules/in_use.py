"""Choose between the tables of both backends of a node: which of them serve it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pykubeproxy.rules.ruleset import KUBELET_HINTS
from pykubeproxy.rules.saves import SavedTables
from pykubeproxy.rules.skeleton import NAT_SERVICES

_BACKENDS = ("nft", "legacy")


class TablesInUse(NamedTuple):
    """The tables of the backend in use, which may be of one or both families.

    `other` is the other backend if it has service-proxy rules too, so that packets pass both; else "".
    """

    backend: str
    tables: Sequence[SavedTables]
    other: str


def of_backend(tables: Iterable[SavedTables], backend: str) -> Sequence[SavedTables]:
    """Return the tables of a backend, "nft" or "legacy", and those whose backend is unknown."""
    return [it for it in tables if it.backend in (backend, "")]


def tables_in_use(tables: Sequence[SavedTables]) -> TablesInUse:
    """Choose the backend with service-proxy rules, else the one with the kubelet's chains, else that with more rules."""
    groups = {name: of_backend(tables, name) for name in _BACKENDS}
    used = max(groups, key=lambda name: _signs_of_use(groups[name]))
    other = next(name for name in groups if name != used)
    both = any(NAT_SERVICES in it.ruleset.chains for it in groups[other] if it.backend)
    return TablesInUse(used, groups[used], other if both else "")


def _signs_of_use(tables: Sequence[SavedTables]) -> tuple[bool, bool, int]:
    chains = [it.ruleset.chains for it in tables]
    return (
        any(NAT_SERVICES in it for it in chains),
        any(hint in it for it in chains for hint in KUBELET_HINTS),
        sum(len(it.ruleset) for it in tables),
    )
