"""The objects of a cluster, with a version for each write, and cursors to watch them."""

import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.lab.apiserver import resources
from pykubeproxy.lab.apiserver.allocation import Allocations
from pykubeproxy.lab.apiserver.defaults import admit, claims
from pykubeproxy.lab.apiserver.errors import ApiError, conflict, not_found, too_new
from pykubeproxy.lab.apiserver.history import Change, Cursor, History, Stored
from pykubeproxy.lab.apiserver.resources import (
    ENDPOINT_SLICES,
    PODS,
    RESOURCES,
    SERVICES,
    JsonObject,
    Resource,
)
from pykubeproxy.lab.apiserver.write import (
    Part,
    created,
    decoded,
    encoded,
    grace_seconds,
    merged,
    now,
    replaced,
    same,
    with_generation,
)

SERVICE_CIDRS = ("10.96.0.0/16", "fd00:10:96::/112")


class Snapshot(NamedTuple):
    """The objects of a resource at one version, sorted by namespace and name."""

    version: int
    objects: Sequence[Stored]


class Store:
    """All objects, for any thread.

    Objects are plain dicts as in a manifest, with apiVersion and kind. Writes apply the defaults and checks of a
    real server; `verbatim` skips them, to show clients what no server would. `part` limits what a write may change.

    Refused writes raise ApiError: 404 not found, 409 already exists or outdated, 400 and 422 invalid. An object of
    a kind that is not served raises ValueError.
    """

    def __init__(
        self,
        service_cidrs: Sequence[str] = SERVICE_CIDRS,
        *,
        history: int = 20_000,
        first_version: int = 1,
        progress_seconds: float = 600.0,
    ) -> None:
        """`service_cidrs` are the ranges of cluster IPs, the primary family first.

        `history` is the number of changes of each resource to keep for watches. Every `progress_seconds`, as etcd does,
        the store reports its newest version for resources that have not changed; kubeadm sets 5 seconds.
        """
        self._lock = threading.RLock()
        self._version = first_version
        self._histories = {resource: History(history, first_version) for resource in RESOURCES}
        self._in_use = Allocations(service_cidrs)
        self._progress_seconds = progress_seconds
        self._reported, self._next_report = first_version, time.monotonic() + progress_seconds

    @property
    def version(self) -> int:
        return self._version

    def create(self, item: JsonObject, *, part: Part = "all", verbatim: bool = False) -> JsonObject:
        """Add an object and return it as stored."""
        resource = resources.of(item)
        with self._lock:
            return _typed(resource, self._create(resource, item, part, verbatim).body)

    def load(self, items: Iterable[JsonObject], *, verbatim: bool = False) -> None:
        """Add many objects, with no other write in between."""
        with self._lock:
            for item in items:
                self._create(resources.of(item), item, "all", verbatim)

    def replace(self, item: JsonObject, *, part: Part = "all", verbatim: bool = False) -> JsonObject:
        """Replace an object. An outdated resourceVersion is a 409."""
        resource = resources.of(item)
        meta = item.get("metadata") or {}
        with self._lock:
            old = self.read(resource, meta.get("namespace") or "default", str(meta.get("name", "")))
            return self._replace(resource, old, item, part, verbatim)

    def merge_patch(
        self, resource: Resource, namespace: str, name: str, patch: JsonObject, *, part: Part = "all"
    ) -> JsonObject:
        """Apply a JSON merge patch (RFC 7396)."""
        with self._lock:
            old = self.read(resource, namespace, name)
            return self._replace(resource, old, merged(_typed(resource, old.body), patch), part, False)

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        version: str = "",
        grace: int | None = None,
    ) -> JsonObject:
        """Remove an object and return its last state; with finalizers, only set its deletionTimestamp.

        A pod on a node gets a deletionTimestamp, too, and goes when deleted with a `grace` of 0 seconds, which is how
        a kubelet confirms its end. Another `uid` or `version`, if given, is a 409.
        """
        with self._lock:
            old = self.read(resource, namespace, name)
            item = decoded(old)
            meta = item["metadata"]
            if uid not in ("", meta["uid"]) or version not in ("", meta["resourceVersion"]):
                raise conflict(resource, name, "the precondition describes another object")
            seconds = grace_seconds(resource, item, grace)
            if not meta.get("finalizers") and not seconds:
                return self._remove(resource, old)
            if "deletionTimestamp" not in meta:
                meta["deletionTimestamp"] = now(seconds)
                if resource is PODS:
                    meta["deletionGracePeriodSeconds"] = seconds
                old = self._write(resource, old, item)
            return _typed(resource, old.body)

    def list(self, resource: Resource) -> list[JsonObject]:
        """Return all objects of a resource, sorted by namespace and name."""
        return [_typed(resource, stored.body) for stored in self.snapshot(resource).objects]

    def read(self, resource: Resource, namespace: str, name: str) -> Stored:
        """Return one object, encoded. Raise a 404."""
        stored = self._histories[resource].objects.get(resource.path(namespace, name))
        if stored is None:
            raise not_found(resource, name)
        return stored

    def snapshot(self, resource: Resource, version: int | None = None) -> Snapshot:
        """Return all objects now or at a version. Raise a 410 for one too old, a 504 for a future one."""
        with self._lock:
            if version is None or version == self._version:
                return Snapshot(self._version, self._histories[resource].present())
            if version > self._version:
                raise too_new(version, self._version)
            return Snapshot(version, self._histories[resource].at(version))

    def watch(self, resource: Resource, after: int | None = None) -> Cursor:
        """Return a cursor over the changes after a version, or over the present objects and then the changes.

        Raise a 410 if `after` is too old. End the cursor with `unwatch`.
        """
        with self._lock:
            return self._histories[resource].open(after, self._version)

    def unwatch(self, resource: Resource, cursor: Cursor) -> None:
        with self._lock:
            self._histories[resource].cursors.discard(cursor)
            cursor.close()

    def changes(self, resource: Resource, cursor: Cursor) -> tuple[int, Sequence[Change]]:
        """Return the last known version of a resource and the changes since the last call. Raises Lagging.

        That is the version of its last change, or of a later report of progress.
        """
        with self._lock:
            now, history = time.monotonic(), self._histories[resource]
            if now >= self._next_report:
                self._reported, self._next_report = self._version, now + self._progress_seconds
            return max(history.newest, self._reported), history.read(cursor)

    def compact(self) -> None:
        """Drop all history: watches and continued lists from any earlier version get a 410."""
        with self._lock:
            for history in self._histories.values():
                history.compact(self._version)

    def _create(self, resource: Resource, given: JsonObject, part: Part, verbatim: bool) -> Stored:
        item = created(resource, given, part, verbatim)
        meta = item["metadata"]
        path = resource.path(meta.get("namespace", ""), str(meta.get("name", "")))
        if path in self._histories[resource].objects:
            name, details = meta["name"], resource.details(meta["name"])
            message = f'{resource.qualified} "{name}" already exists'
            raise ApiError(409, message, reason="AlreadyExists", details=details)
        if not verbatim:
            admit(resource, item, None, path, self._in_use)
        return self._write(resource, None, item)

    def _replace(
        self, resource: Resource, old: Stored, given: JsonObject, part: Part, verbatim: bool
    ) -> JsonObject:
        item = replaced(resource, given, old, part, verbatim)
        before, meta = decoded(old), item["metadata"]
        if not verbatim:
            admit(resource, item, before, old.path, self._in_use)
        if resource is ENDPOINT_SLICES:
            item = with_generation(item, before)
        if same(item, before):
            return _typed(resource, old.body)  # no new version, no event
        waits = meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")
        if not verbatim and "deletionTimestamp" in meta and not waits:
            return self._remove(resource, old)
        return _typed(resource, self._write(resource, old, item).body)

    def _write(self, resource: Resource, old: Stored | None, item: JsonObject) -> Stored:
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
        return _typed(resource, change.deleted_body)


def _typed(resource: Resource, body: bytes) -> JsonObject:
    return msgspec.json.decode(resource.typed(body), type=JsonObject)
