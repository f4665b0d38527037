"""The present objects of the cluster: the one place where they are kept."""

from collections.abc import Iterator

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
from pykubeproxy.services.endpoints import belongs


class Cluster:
    """Services, their EndpointSlices and Nodes as the events so far leave them.

    Not thread-safe: one thread applies events and reads.
    """

    def __init__(self) -> None:
        self._listed: set[Kind] = set()
        self._services: dict[Key, Service] = {}
        self._slices: dict[Key, EndpointSlice] = {}
        self._slices_of: dict[Key, dict[str, EndpointSlice]] = {}
        self._nodes: dict[str, Node] = {}

    def apply(self, event: Event) -> set[Key]:
        """Take in one event; returns the Services that it concerns. One that changes nothing concerns none."""
        match event:
            case Listed(kind, objects):
                return self._replace(kind, objects)
            case Updated(object_):
                return self._put(object_)
            case Deleted(kind, key):
                return self._remove(kind, key)

    def has_listed(self, *kinds: Kind) -> bool:
        """Whether the complete state of all these kinds has been seen."""
        return self._listed.issuperset(kinds)

    def service(self, key: Key) -> Service | None:
        return self._services.get(key)

    def services(self) -> Iterator[Service]:
        return iter(self._services.values())

    def slices_of(self, key: Key, family: Family) -> tuple[EndpointSlice, ...]:
        """The EndpointSlices of a Service that count in a family, in the order of their names."""
        return tuple(slice_ for slice_ in self.all_slices_of(key) if belongs(slice_, family))

    def all_slices_of(self, key: Key) -> tuple[EndpointSlice, ...]:
        """The EndpointSlices that bear the name of a Service, in the order of their names, whether they count or not."""
        slices = self._slices_of.get(key, {})
        return tuple(slices[name] for name in sorted(slices))

    def node(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def counts(self) -> tuple[int, int]:
        """How many Services and how many EndpointSlices there are."""
        return len(self._services), len(self._slices)

    def _replace(self, kind: Kind, objects: tuple[Object, ...]) -> set[Key]:
        self._listed.add(kind)
        present = {object_.key for object_ in objects}
        concerned: set[Key] = set()
        for key in self._keys(kind) - present:
            concerned |= self._remove(kind, key)
        for object_ in objects:
            concerned |= self._put(object_)
        return concerned

    def _keys(self, kind: Kind) -> set[Key]:
        match kind:
            case Kind.SERVICE:
                return set(self._services)
            case Kind.ENDPOINT_SLICE:
                return set(self._slices)
            case Kind.NODE:
                return {Key("", name) for name in self._nodes}

    def _put(self, object_: Object) -> set[Key]:
        match object_:
            case Service():
                if self._services.get(object_.key) == object_:
                    return set()
                self._services[object_.key] = object_
                return {object_.key}
            case EndpointSlice():
                return self._put_slice(object_)
            case Node():
                self._nodes[object_.name] = object_
                return set()

    def _put_slice(self, slice_: EndpointSlice) -> set[Key]:
        if self._slices.get(slice_.key) == slice_:
            return set()
        # The label may have moved the slice to another Service; then both are concerned.
        concerned = self._remove(Kind.ENDPOINT_SLICE, slice_.key)
        self._slices[slice_.key] = slice_
        self._slices_of.setdefault(slice_.service_key, {})[slice_.name] = slice_
        return concerned | {slice_.service_key}

    def _remove(self, kind: Kind, key: Key) -> set[Key]:
        match kind:
            case Kind.SERVICE:
                return {key} if self._services.pop(key, None) else set()
            case Kind.ENDPOINT_SLICE:
                return self._remove_slice(key)
            case Kind.NODE:
                self._nodes.pop(key.name, None)
                return set()

    def _remove_slice(self, key: Key) -> set[Key]:
        slice_ = self._slices.pop(key, None)
        if slice_ is None:
            return set()
        siblings = self._slices_of[slice_.service_key]
        del siblings[slice_.name]
        if not siblings:
            del self._slices_of[slice_.service_key]
        return {slice_.service_key}
