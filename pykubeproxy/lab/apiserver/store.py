"""The objects of a cluster, each write with a version of its own, and watches over them. Knows nothing of HTTP."""

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.lab.apiserver import resources
from pykubeproxy.lab.apiserver.allocation import Allocations
from pykubeproxy.lab.apiserver.defaults import admit, claims
from pykubeproxy.lab.apiserver.errors import already_exists, conflict, not_found, too_new
from pykubeproxy.lab.apiserver.history import Change, Cursor, History, Stored
from pykubeproxy.lab.apiserver.resources import ENDPOINT_SLICES, RESOURCES, SERVICES, JsonObject, Resource
from pykubeproxy.lab.apiserver.writing import (
    Part,
    created,
    decoded,
    encoded,
    merged,
    now,
    replaced,
    same,
    with_generation,
)


class Snapshot(NamedTuple):
    """The objects of a resource as they were at one version, sorted by namespace and name."""

    version: int
    objects: Sequence[Stored]


class Store:
    """All objects, safe to use from any thread.

    Objects are plain dicts as in a manifest, with apiVersion and kind. Writing takes them through the defaults and
    checks of a real server; `verbatim` leaves an object as it is, so that a client can be shown what no server would
    let through. `part` says what a write may change: "spec" is what a client may at an object's own path, "status"
    at its status subresource; "all" spares a test the second request.

    Refused writes raise ApiError: 404 not found, 409 already exists or changed meanwhile, 400 and 422 invalid;
    an object of a kind that is not served raises ValueError.
    """

    def __init__(
        self,
        service_cidrs: Sequence[str] = ("10.96.0.0/16", "fd00:10:96::/112"),
        *,
        history: int = 20_000,
        first_version: int = 1,
    ) -> None:
        """`history` is how many changes of each resource a watch can go back; an older version is answered 410."""
        self._lock = threading.RLock()
        self._version = first_version
        self._histories = {resource: History(history, first_version) for resource in RESOURCES}
        self._in_use = Allocations(service_cidrs)

    @property
    def version(self) -> int:
        """The resourceVersion of the latest write."""
        return self._version

    def create(self, item: JsonObject, *, part: Part = "all", verbatim: bool = False) -> JsonObject:
        """Add an object and return it as stored."""
        resource = resources.of(item)
        with self._lock:
            stored = self._create(resource, item, part, verbatim)
            self._histories[resource].wake()
        return _typed(resource, stored)

    def load(self, items: Iterable[JsonObject], *, verbatim: bool = False) -> int:
        """Add many objects in one go and return how many. Watchers are woken once, at the end."""
        count = 0
        with self._lock:
            try:
                for item in items:
                    self._create(resources.of(item), item, "all", verbatim)
                    count += 1
            finally:
                for history in self._histories.values():
                    history.wake()
        return count

    def replace(self, item: JsonObject, *, part: Part = "all", verbatim: bool = False) -> JsonObject:
        """Replace an object. With a resourceVersion that is not the present one it is refused with a 409."""
        resource = resources.of(item)
        meta = item.get("metadata") or {}
        with self._lock:
            old = self.read(resource, meta.get("namespace") or "default", str(meta.get("name", "")))
            return self._replace(resource, old, item, part, verbatim)

    def merge_patch(
        self, resource: Resource, namespace: str, name: str, patch: JsonObject, *, part: Part = "all"
    ) -> JsonObject:
        """Apply a JSON merge patch (RFC 7396): members replace members, null removes one, a list replaces a list."""
        with self._lock:
            old = self.read(resource, namespace, name)
            return self._replace(resource, old, merged(_typed(resource, old), patch), part, False)

    def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", version: str = ""
    ) -> JsonObject:
        """Remove an object and return its last state; with finalizers it is only marked with a deletionTimestamp.

        `uid` and `version`, if given, must be those of the object, or a 409 is raised.
        """
        with self._lock:
            old = self.read(resource, namespace, name)
            item = decoded(old)
            meta = item["metadata"]
            if uid not in ("", meta["uid"]) or version not in ("", meta["resourceVersion"]):
                raise conflict(resource, name, "it is not the object that the precondition describes")
            if not meta.get("finalizers"):
                return self._remove(resource, old)
            if "deletionTimestamp" not in meta:
                meta["deletionTimestamp"] = now()
                old = self._write(resource, old, item)
                self._histories[resource].wake()
            return _typed(resource, old)

    def get(self, resource: Resource, namespace: str, name: str) -> JsonObject:
        """One object (the namespace of a node does not matter). Raises a 404."""
        return _typed(resource, self.read(resource, namespace, name))

    def list(self, resource: Resource) -> list[JsonObject]:
        """All objects of a resource, sorted by namespace and name."""
        return [_typed(resource, stored) for stored in self.snapshot(resource).objects]

    def read(self, resource: Resource, namespace: str, name: str) -> Stored:
        """One object as it is kept, encoded. Raises a 404."""
        stored = self._histories[resource].objects.get(resource.path(namespace, name))
        if stored is None:
            raise not_found(resource, name)
        return stored

    def snapshot(self, resource: Resource, version: int | None = None) -> Snapshot:
        """All objects now, or as they were at a version. Raises a 410 for one long past, a 504 for a future one."""
        with self._lock:
            if version is None or version == self._version:
                return Snapshot(self._version, self._histories[resource].present())
            if version > self._version:
                raise too_new(version, self._version)
            return Snapshot(version, self._histories[resource].at(version))

    def watch(self, resource: Resource, after: int | None = None) -> Cursor:
        """A cursor over the changes after a version, or over the present objects and then the changes.

        Raises a 410 if the changes since `after` are no longer known. Give it back with `unwatch`.
        """
        with self._lock:
            return self._histories[resource].open(after, self._version)

    def unwatch(self, resource: Resource, cursor: Cursor) -> None:
        """End a watch."""
        with self._lock:
            self._histories[resource].cursors.discard(cursor)
            cursor.close()

    def changes(self, resource: Resource, cursor: Cursor) -> tuple[int, Sequence[Change]]:
        """The present version and what happened up to it since the cursor was last read. Raises Lagging."""
        with self._lock:
            return self._version, self._histories[resource].read(cursor)

    def compact(self) -> None:
        """Forget all history: watches and continued lists from any earlier version are answered 410."""
        with self._lock:
            for history in self._histories.values():
                history.forget(self._version)

    def _create(self, resource: Resource, given: JsonObject, part: Part, verbatim: bool) -> Stored:
        item = created(resource, given, part, verbatim)
        meta = item["metadata"]
        path = resource.path(meta.get("namespace", ""), str(meta.get("name", "")))
        if path in self._histories[resource].objects:
            raise already_exists(resource, meta["name"])
        if not verbatim:
            admit(resource, item, None, path, self._in_use)
        return self._write(resource, None, item)

    def _replace(
        self, resource: Resource, old: Stored, given: JsonObject, part: Part, verbatim: bool
    ) -> JsonObject:
        item = replaced(resource, given, old, part, verbatim)
        before = decoded(old)
        if not verbatim:
            admit(resource, item, before, old.path, self._in_use)
        if resource is ENDPOINT_SLICES:
            item = with_generation(item, before)
        if same(item, before):
            return _typed(resource, old)  # nothing changed: no new version, no event
        if (
            not verbatim
            and "deletionTimestamp" in item["metadata"]
            and not item["metadata"].get("finalizers")
        ):
            return self._remove(resource, old)
        stored = self._write(resource, old, item)
        self._histories[resource].wake()
        return _typed(resource, stored)

    def _write(self, resource: Resource, old: Stored | None, item: JsonObject) -> Stored:
        """Store an object under the next version. Waking the watchers is left to the caller."""
        stored = encoded(resource, item, self._version + 1)
        self._version += 1
        self._histories[resource].apply(Change(self._version, old, stored))
        if resource is SERVICES:
            self._in_use.settle(stored.path, claims(item))
        return stored

    def _remove(self, resource: Resource, old: Stored) -> JsonObject:
        self._version += 1
        change = Change(self._version, old, None)
        self._histories[resource].apply(change)
        if resource is SERVICES:
            self._in_use.settle(old.path, frozenset())
        self._histories[resource].wake()
        return msgspec.json.decode(resource.typed(change.farewell()), type=JsonObject)


def _typed(resource: Resource, stored: Stored) -> JsonObject:
    return msgspec.json.decode(resource.typed(stored.body), type=JsonObject)
