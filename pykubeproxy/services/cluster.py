"""The current Services, EndpointSlices and Nodes of the cluster."""

from collections.abc import Iterator, Mapping

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
)
from pykubeproxy.services.endpoints import slice_skip_reason


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
        self._objects: Mapping[Kind, Mapping[Key, Object]] = {
            Kind.SERVICE: self._services,
            Kind.ENDPOINT_SLICE: self._slices,
            Kind.NODE: self._nodes,
        }

    def apply(self, event: Event) -> set[Key]:
        """Apply one event and return the keys of the Services it changes."""
        match event:
            case Listed(kind, objects):
                return self._replace(kind, objects)
            case Updated(object_):
                return self._put(object_)
            case Deleted(kind, key):
                return self._remove(kind, key)

    def has_listed(self, *kinds: Kind) -> bool:
        """Return whether all these kinds have been listed."""
        return self._listed.issuperset(kinds)

    def service(self, key: Key) -> Service | None:
        return self._services.get(key)

    def services(self) -> Iterator[Service]:
        return iter(self._services.values())

    def slices_of(self, key: Key, family: Family) -> tuple[EndpointSlice, ...]:
        """Return the usable EndpointSlices of a Service in a family, sorted by name."""
        return tuple(
            slice_ for slice_ in self.all_slices_of(key) if slice_skip_reason(slice_, family) is None
        )

    def all_slices_of(self, key: Key) -> tuple[EndpointSlice, ...]:
        """Return all EndpointSlices labelled with a Service, usable or not, sorted by name."""
        slices = self._slices_of.get(key, {})
        return tuple(slices[name] for name in sorted(slices))

    def node(self, name: str) -> Node | None:
        """Return a Node as last seen, even if it has been deleted since."""
        return self._nodes.get(Key("", name))

    def counts(self) -> tuple[int, int]:
        """Return the number of Services and of EndpointSlices."""
        return len(self._services), len(self._slices)

    def _replace(self, kind: Kind, objects: tuple[Object, ...]) -> set[Key]:
        self._listed.add(kind)
        present = {object_.key for object_ in objects}
        affected: set[Key] = set()
        for key in self._objects[kind].keys() - present:
            affected |= self._remove(kind, key)
        for object_ in objects:
            affected |= self._put(object_)
        return affected

    def _put(self, object_: Object) -> set[Key]:
        key = object_.key
        match object_:
            case Node():
                self._nodes[key] = _with_last_known(object_, self._nodes.get(key))
                return set()
            case Service():
                if self._services.get(key) == object_:
                    return set()
                self._services[key] = object_
                return {key}
            case EndpointSlice():
                if self._slices.get(key) == object_:
                    return set()
                # A changed label moves the slice to another Service; both are affected.
                affected = self._remove(Kind.ENDPOINT_SLICE, key)
                self._slices[key] = object_
                self._slices_of.setdefault(object_.service_key, {})[object_.name] = object_
                return affected | {object_.service_key}

    def _remove(self, kind: Kind, key: Key) -> set[Key]:
        match kind:
            case Kind.NODE:
                return set()
            case Kind.SERVICE:
                return {key} if self._services.pop(key, None) else set()
            case Kind.ENDPOINT_SLICE:
                slice_ = self._slices.pop(key, None)
                if slice_ is None:
                    return set()
                siblings = self._slices_of[slice_.service_key]
                del siblings[slice_.name]
                if not siblings:
                    del self._slices_of[slice_.service_key]
                return {slice_.service_key}


def _with_last_known(node: Node, before: Node | None) -> Node:
    """Return a Node with the addresses and pod CIDRs of `before` if it has none: one created again lacks them at first."""
    if before is None:
        return node
    return msgspec.structs.replace(
        node,
        addresses=node.addresses or before.addresses,
        pod_cidrs=node.pod_cidrs or before.pod_cidrs,
    )
