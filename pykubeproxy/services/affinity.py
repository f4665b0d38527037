"""Which Services keep session affinity: each namespace may use a fixed number of the kernel's lists of clients.

For each port and endpoint with affinity the kernel has a list of clients, which it finds by its name, one list after the
other: the time grows with the square of their number. The choice depends on objects alone, so all nodes agree, and on
those of one namespace alone, so no other one can take affinity from a Service.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pykubeproxy.objects import EndpointSlice, Family, Key, Service
from pykubeproxy.services.ports import ServiceSkipReason, cluster_ip


class Claim(NamedTuple):
    """The lists that affinity of one Service needs. In order of precedence: the oldest Service comes first."""

    created: float
    name: str
    lists: int


def affinity_claim(service: Service, slices: Iterable[EndpointSlice]) -> Claim | None:
    """Return the claim of a Service with these slices, in both families together; None if it needs no list.

    Each endpoint counts, ready or not, so that readiness does not change which Services keep affinity.
    """
    if service.affinity_seconds is None:
        return None
    served = {family for family in Family if not isinstance(cluster_ip(service, family), ServiceSkipReason)}
    lists = sum(
        max(len(service.ports), len(slice_.ports)) * len(slice_.endpoints)
        for slice_ in slices
        if slice_.family in served and not slice_.headless
    )
    return Claim(service.created, service.name, lists) if lists else None


def rivals(wanted: Iterable[Service], services: Iterable[Service]) -> tuple[Service, ...]:
    """Return the other Services that may decide whether the wanted ones keep affinity."""
    asking = {it.key for it in wanted if it.affinity_seconds is not None}
    namespaces = {key.namespace for key in asking}
    return tuple(
        it
        for it in services
        if it.affinity_seconds is not None and it.namespace in namespaces and it.key not in asking
    )


class AffinityShares:
    """Remember the claims of all Services, and which Services keep affinity. Not thread-safe."""

    def __init__(self) -> None:
        self._claims: dict[str, dict[str, Claim]] = {}
        # The answers given so far, by namespace and limit: the names of the Services that keep affinity.
        self._kept: dict[tuple[str, int], frozenset[str]] = {}

    def all_claims(self) -> Mapping[str, Mapping[str, Claim]]:
        """Return the claims by namespace and name."""
        return self._claims

    def claim(self, key: Key) -> Claim | None:
        """Return the claim of a Service; None if it has none."""
        return self._claims.get(key.namespace, {}).get(key.name)

    def unkept_lists(self, key: Key, limit: int) -> int:
        """Return how many lists affinity of a Service needs if it is not kept, else 0; a `limit` of 0 keeps all."""
        claim = self.claim(key)
        if claim is None or not limit:
            return 0
        case = key.namespace, limit
        if case not in self._kept:
            self._kept[case] = kept_claims(self._claims[key.namespace].values(), limit)
        return 0 if key.name in self._kept[case] else claim.lists

    def update(self, claims: Mapping[Key, Claim | None]) -> set[Key]:
        """Replace these claims, and return the Services that keep or lose affinity by that."""
        changed = {key: claim for key, claim in claims.items() if claim != self.claim(key)}
        for key, claim in changed.items():
            others = self._claims.setdefault(key.namespace, {})
            if claim is None:
                del others[key.name]
            else:
                others[key.name] = claim
            if not others:
                del self._claims[key.namespace]
        namespaces = {key.namespace for key in changed}
        answers: set[Key] = set()
        for case in [case for case in self._kept if case[0] in namespaces] if namespaces else ():
            namespace, limit = case
            before = self._kept.pop(case)
            if namespace in self._claims:
                now = self._kept[case] = kept_claims(self._claims[namespace].values(), limit)
                answers |= {Key(namespace, name) for name in before ^ now}
        return answers


def kept_claims(claims: Iterable[Claim], limit: int) -> frozenset[str]:
    """Return which Services of a namespace keep affinity. A claim that does not fit takes nothing from those after it."""
    kept, left = [], limit
    for claim in sorted(claims):
        if claim.lists <= left:
            kept.append(claim.name)
            left -= claim.lists
    return frozenset(kept)
