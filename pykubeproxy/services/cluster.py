"""The current Services, EndpointSlices and Nodes of the cluster, and which Services keep session affinity."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Self

import msgspec

from pykubeproxy.objects import (
    Deleted,
    EndpointSlice,
    Event,
    Family,
    Key,
    Kind,
    Listed,
    Node,
    Object,
    Service,
    Updated,
    family_of,
)
from pykubeproxy.services.endpoints import slice_skip_reason
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
    asking = {service.key for service in wanted if service.affinity_seconds is not None}
    namespaces = {key.namespace for key in asking}
    return tuple(
        service
        for service in services
        if service.affinity_seconds is not None
        and service.namespace in namespaces
        and service.key not in asking
    )


class AffinityShares:
    """Remember the claims of all Services, and which Services keep affinity. Not thread-safe.

    For each port and endpoint with affinity the kernel has a list of clients. It finds a list by its name, one after the
    other: the time grows with the square of their number. So each namespace may use a fixed number of lists. The choice
    depends on objects alone, so all nodes agree, and on those of one namespace alone, so no other one can take affinity
    from a Service.
    """

    def __init__(self) -> None:
        self.claims: dict[str, dict[str, Claim]] = {}  # by namespace and name
        # The answers given so far, by namespace and limit: the names of the Services that keep affinity.
        self._kept: dict[tuple[str, int], frozenset[str]] = {}

    def claim(self, key: Key) -> Claim | None:
        """Return the claim of a Service; None if it has none."""
        return self.claims.get(key.namespace, {}).get(key.name)

    def unkept_lists(self, key: Key, limit: int) -> int:
        """Return how many lists affinity of a Service needs if it is not kept, else 0.

        Each namespace may use `limit` lists; 0 allows any number. Later changes of the answer count as changes of the
        Service: see `Cluster.apply`.
        """
        claim = self.claim(key)
        if claim is None or not limit:
            return 0
        case = key.namespace, limit
        if case not in self._kept:
            self._kept[case] = kept_claims(self.claims[key.namespace].values(), limit)
        return 0 if key.name in self._kept[case] else claim.lists

    def update(self, claims: Mapping[Key, Claim | None]) -> set[Key]:
        """Replace these claims, and return the Services that keep or lose affinity by that."""
        changed = {key: claim for key, claim in claims.items() if claim != self.claim(key)}
        for key, claim in changed.items():
            others = self.claims.setdefault(key.namespace, {})
            if claim is None:
                del others[key.name]
            else:
                others[key.name] = claim
            if not others:
                del self.claims[key.namespace]
        namespaces = {key.namespace for key in changed}
        answers: set[Key] = set()
        for case in [case for case in self._kept if case[0] in namespaces] if namespaces else ():
            namespace, limit = case
            before = self._kept.pop(case)
            if namespace in self.claims:
                now = self._kept[case] = kept_claims(self.claims[namespace].values(), limit)
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


class ServiceChange(NamedTuple):
    """How many objects of a Service have changed in each family, and whether it may have lost something there.

    That is a port, an address or a usable endpoint. Its rules must lose it at once; what a Service gains may wait.
    """

    ipv4: int = 0
    ipv6: int = 0
    loses: bool = False

    @classmethod
    def of_one(cls, families: Collection[Family], loses: bool = False) -> Self:
        """Return the change by one object that has an effect in these families."""
        return cls(Family.IPV4 in families, Family.IPV6 in families, loses)

    def objects(self, families: Collection[Family]) -> int:
        """Return how many objects have changed in these families; one counts in each."""
        return self.ipv4 * (Family.IPV4 in families) + self.ipv6 * (Family.IPV6 in families)


ChangedServices = dict[Key, ServiceChange]


def families_of(object_: Service | EndpointSlice) -> frozenset[Family]:
    """Return the families in which an object can have an effect on rules."""
    if isinstance(object_, Service):
        return frozenset(map(family_of, object_.cluster_ips))
    usable = object_.family and object_.service and not object_.headless
    return frozenset({object_.family}) if object_.family and usable else frozenset()


class Cluster:
    """Store the objects that events report. Not thread-safe: one thread applies events and reads.

    A deleted Node stays as last seen, as in kube-proxy: its pods may still run.
    """

    def __init__(self) -> None:
        self._listed: set[Kind] = set()
        self._services: dict[Key, Service] = {}
        self._slices: dict[Key, EndpointSlice] = {}
        self._slices_of: dict[Key, dict[str, EndpointSlice]] = {}
        self._nodes: dict[Key, Node] = {}
        self.affinity = AffinityShares()
        self._objects: Mapping[Kind, Mapping[Key, Object]] = {
            Kind.SERVICE: self._services,
            Kind.ENDPOINT_SLICE: self._slices,
            Kind.NODE: self._nodes,
        }

    def apply(self, event: Event) -> ChangedServices:
        """Apply one event and return what it changes."""
        match event:
            case Listed(kind, objects):
                changes = self._replace(kind, objects)
            case Updated(object_):
                changes = self._put(object_)
            case Deleted(kind, key):
                changes = self._remove(kind, key)
        for key in self._changed_affinity(changes):
            if service := self._services.get(key):
                changes[key] = _either(changes.get(key), ServiceChange.of_one(families_of(service)))
        return changes

    def has_listed(self, *kinds: Kind) -> bool:
        """Return whether all these kinds have been listed."""
        return self._listed.issuperset(kinds)

    def service(self, key: Key) -> Service | None:
        return self._services.get(key)

    def service_uid(self, key: Key) -> str:
        """Return the UID of a Service, "" if it is unknown. Any thread may call this."""
        service = self._services.get(key)
        return service.uid if service else ""

    def services(self) -> Iterator[Service]:
        return iter(self._services.values())

    def slices_of(self, key: Key, family: Family) -> tuple[EndpointSlice, ...]:
        """Return the usable EndpointSlices of a Service in a family, sorted by name."""
        slices = self.all_slices_of(key)
        return tuple([slice_ for slice_ in slices if slice_skip_reason(slice_, family) is None])

    def all_slices_of(self, key: Key) -> tuple[EndpointSlice, ...]:
        """Return all EndpointSlices labelled with a Service, usable or not, sorted by name."""
        slices = self._slices_of.get(key, {})
        return tuple([slices[name] for name in sorted(slices)])

    def node(self, name: str) -> Node | None:
        """Return a Node as last seen, even if it has been deleted since."""
        return self._nodes.get(Key("", name))

    def counts(self) -> tuple[int, int]:
        """Return the number of Services and of EndpointSlices."""
        return len(self._services), len(self._slices)

    def _changed_affinity(self, changes: Iterable[Key]) -> set[Key]:
        """Return the Services that keep or lose session affinity because these Services have changed."""
        claims = {}
        for key in changes:
            service = self._services.get(key)
            if service and service.affinity_seconds is not None:
                claims[key] = affinity_claim(service, self._slices_of.get(key, {}).values())
            elif self.affinity.claim(key):
                claims[key] = None
        return self.affinity.update(claims)

    def _replace(self, kind: Kind, objects: tuple[Object, ...]) -> ChangedServices:
        self._listed.add(kind)
        present = {object_.key for object_ in objects}
        removed = [self._remove(kind, key) for key in self._objects[kind].keys() - present]
        return _merged(itertools.chain(removed, map(self._put, objects)))

    def _put(self, object_: Object) -> ChangedServices:
        key = object_.key
        match object_:
            case Node():
                self._nodes[key] = _with_last_known(object_, self._nodes.get(key))
                return {}
            case Service():
                before = self._services.get(key)
                if before == object_:
                    return {}
                self._services[key] = object_
                families = families_of(object_).union(families_of(before) if before else ())
                return {key: ServiceChange.of_one(families, loses=before is not None)}
            case EndpointSlice():
                known = self._slices.get(key)
                if known == object_:
                    return {}
                # A changed label moves the slice to another Service; both are affected.
                changes = self._remove(Kind.ENDPOINT_SLICE, key)
                service_key, change = object_.service_key, ServiceChange.of_one(families_of(object_))
                self._slices[key] = object_
                self._slices_of.setdefault(service_key, {})[object_.name] = object_
                if known and known.service_key == service_key:
                    changes[service_key] = changes[service_key]._replace(loses=_loses(known, object_))
                changes[service_key] = _either(changes.get(service_key), change)
                return changes

    def _remove(self, kind: Kind, key: Key) -> ChangedServices:
        match kind:
            case Kind.NODE:
                return {}
            case Kind.SERVICE:
                service = self._services.pop(key, None)
                return {key: ServiceChange.of_one(families_of(service), loses=True)} if service else {}
            case Kind.ENDPOINT_SLICE:
                slice_ = self._slices.pop(key, None)
                if slice_ is None:
                    return {}
                siblings = self._slices_of[slice_.service_key]
                del siblings[slice_.name]
                if not siblings:
                    del self._slices_of[slice_.service_key]
                return {slice_.service_key: ServiceChange.of_one(families_of(slice_), loses=True)}


def _with_last_known(node: Node, before: Node | None) -> Node:
    """Return a Node with the addresses and pod CIDRs of `before` if it has none: one created again lacks them at first."""
    if before is None:
        return node
    return msgspec.structs.replace(
        node,
        addresses=node.addresses or before.addresses,
        pod_cidrs=node.pod_cidrs or before.pod_cidrs,
    )


def _loses(before: EndpointSlice, after: EndpointSlice) -> bool:
    """Return whether a slice has other ports now, or an endpoint of it is gone or less usable."""
    ready, serving = (
        {e.address for e in after.endpoints if e.ready},
        {e.address for e in after.endpoints if e.serving},
    )
    return (
        families_of(before) != families_of(after)
        or before.ports != after.ports
        or any(
            (endpoint.ready and endpoint.address not in ready)
            or (endpoint.serving and endpoint.address not in serving)
            for endpoint in before.endpoints
        )
    )


def _either(one: ServiceChange | None, other: ServiceChange) -> ServiceChange:
    """Join two changes by one object."""
    if one is None:
        return other
    return ServiceChange(max(one.ipv4, other.ipv4), max(one.ipv6, other.ipv6), one.loses or other.loses)


def _merged(changes: Iterable[ChangedServices]) -> ChangedServices:
    merged: ChangedServices = {}
    for changed in changes:
        for key, change in changed.items():
            if before := merged.get(key):
                ipv4, ipv6 = before.ipv4 + change.ipv4, before.ipv6 + change.ipv6
                change = ServiceChange(ipv4, ipv6, before.loses or change.loses)
            merged[key] = change
    return merged
