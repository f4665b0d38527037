"""The objects of a cluster, with a version for each write, a bounded log of changes, and cursors to watch them."""

import os
import secrets
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from pykubeproxy.lab.apiserver import resources
from pykubeproxy.lab.apiserver.admission import Allocations, admit, claims
from pykubeproxy.lab.apiserver.patches import Patch, merged
from pykubeproxy.lab.apiserver.resources import (
    ENDPOINT_SLICES,
    PODS,
    RESOURCES,
    SERVICES,
    ApiError,
    JsonObject,
    Resource,
    conflict,
    not_found,
    too_new,
    too_old,
)

#: What a write may change. At its own path a client changes the spec, at the status subresource the status.
Part = Literal["all", "spec", "status"]
_SERVER_SET = (
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "resourceVersion",
    "managedFields",
)
_LASTING = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
)
_SET_BY_WRITES = ("resourceVersion", "managedFields")
_ENVELOPE = ("kind", "apiVersion", "metadata")
SERVICE_CIDRS = ("10.96.0.0/16", "fd00:10:96::/112")


class Stored(msgspec.Struct, frozen=True, eq=False):
    """One version of an object, encoded once. The body has no kind and apiVersion, as in a list."""

    path: str
    namespace: str
    name: str
    version: int
    body: bytes
    labels: Mapping[str, str]
    fields: Mapping[str, str]  # for field selectors


@dataclass(eq=False)
class Change:
    """One write: the object before it (None if created) and after it (None if deleted)."""

    version: int
    old: Stored | None
    new: Stored | None

    @cached_property
    def deleted_body(self) -> bytes:
        """The object of a DELETED event: its last state with the version of the deletion."""
        assert self.old is not None
        last = msgspec.json.decode(self.old.body)
        last["metadata"]["resourceVersion"] = str(self.version)
        return msgspec.json.encode(last)


class Lagging(Exception):
    """The log no longer has changes that a cursor has not read."""


class Cursor:
    """A watch's position in the log. Its file descriptor is readable when there may be something to read."""

    def __init__(self, position: int, after: int, initial: Sequence[Stored], start: int) -> None:
        self.position = position  # index of the next change since the store began
        self.after = after  # skip changes up to this version
        self.start = start  # the newest version of the objects or changes that the watch begins with
        self.initial = initial  # the objects that a watch without a version begins with
        self._event = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._event

    def wake(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._event, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next `wake`."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        os.close(self._event)


class History:
    """Objects by path, and their changes since version `oldest`."""

    def __init__(self, limit: int, oldest: int) -> None:
        self.objects: dict[str, Stored] = {}
        self.oldest = oldest  # the oldest version to watch or list from
        self.newest = oldest  # the version of the last change
        self.cursors: set[Cursor] = set()
        self._limit = limit
        self._changes: list[Change] = []
        self._dropped = 0  # number of changes trimmed from the log

    def apply(self, change: Change) -> None:
        """Append a change and wake all cursors. Its version must be larger than any before."""
        if change.new is None:
            assert change.old is not None
            del self.objects[change.old.path]
        else:
            self.objects[change.new.path] = change.new
        self._changes.append(change)
        self.newest = change.version
        for cursor in self.cursors:
            cursor.wake()
        if len(self._changes) > self._limit + self._limit // 4:
            self._trim(len(self._changes) - self._limit)

    def present(self) -> list[Stored]:
        """Return the objects, sorted by path."""
        return [self.objects[path] for path in sorted(self.objects)]

    def at(self, version: int) -> list[Stored]:
        """Return the objects as of a version, sorted by path. Raise a 410 before `oldest`."""
        if version < self.oldest:
            raise too_old(version, self.oldest)
        objects = dict(self.objects)
        for change in reversed(self._changes):
            if change.version <= version:
                break
            if change.old is not None:
                objects[change.old.path] = change.old
            elif change.new is not None:
                del objects[change.new.path]
        return [objects[path] for path in sorted(objects)]

    def open(self, after: int | None, now: int) -> Cursor:
        """Return a cursor behind version `after`, or one that begins with the present objects. Raise a 410."""
        if after is None:
            cursor = Cursor(self._dropped + len(self._changes), now, self.present(), now)
        elif after < self.oldest:
            raise too_old(after, self.oldest)
        else:
            skipped = bisect_right(self._changes, after, key=lambda change: change.version)
            cursor = Cursor(self._dropped + skipped, after, (), max(after, self.newest))
        self.cursors.add(cursor)
        return cursor

    def read(self, cursor: Cursor) -> list[Change]:
        """Return all changes behind the cursor and move it to the end. Raises Lagging if some were trimmed."""
        start = cursor.position - self._dropped
        if start < 0:
            raise Lagging
        cursor.position = self._dropped + len(self._changes)
        return [change for change in self._changes[start:] if change.version > cursor.after]

    def compact(self, now: int) -> None:
        """Drop the whole log. Cursors that have read everything go on."""
        self._trim(len(self._changes))
        self.oldest = now

    def _trim(self, count: int) -> None:
        if count:
            self.oldest = self._changes[count - 1].version
            del self._changes[:count]
            self._dropped += count


def created(resource: Resource, given: JsonObject, part: Part, verbatim: bool) -> JsonObject:
    """Return a new object with its metadata. A verbatim one keeps its deletionTimestamp."""
    item = dict(given) if verbatim else _without_nulls(given)
    meta = _client_metadata(item, verbatim)
    if not meta.get("name") and meta.get("generateName"):
        meta["name"] = f"{meta['generateName']}{secrets.token_hex(3)[:5]}"
    meta["namespace"] = meta.get("namespace") or "default"
    if not resource.namespaced:
        del meta["namespace"]
    meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
    if resource is ENDPOINT_SLICES:
        meta["generation"] = 1
    item["metadata"] = meta
    if part == "spec" and resource in (SERVICES, PODS):
        item.pop("status", None)  # clients cannot create these with a status
    return item


def replaced(resource: Resource, given: JsonObject, old: Stored, part: Part, verbatim: bool) -> JsonObject:
    """Return `old` with the changes of `given`. Raise a 409 if it names another version or uid."""
    item = dict(given) if verbatim else _without_nulls(given)
    before = decoded(old)
    requested, present = metadata_of(item), before["metadata"]
    if requested.get("resourceVersion", "") not in ("", present["resourceVersion"]):
        raise conflict(resource, old.name)
    if requested.get("uid", "") not in ("", present["uid"]):
        raise conflict(resource, old.name, "its uid differs: it was deleted and created again")
    meta = {field: present[field] for field in _LASTING if field in present}
    meta = _client_metadata(item, verbatim=False) | meta
    if verbatim and "deletionTimestamp" in requested:
        meta["deletionTimestamp"] = requested["deletionTimestamp"]
    if part == "status":
        return before | {"status": item.get("status", {})}
    if part == "spec" and resource.status:
        item["status"] = before.get("status", {})
    return item | {"metadata": meta}


def same(item: JsonObject, other: JsonObject) -> bool:
    """Return whether two versions of an object differ only in what each write sets."""
    first, second = (
        {name: value for name, value in one["metadata"].items() if name not in _SET_BY_WRITES}
        for one in (item, other)
    )
    return first == second and _content(item) == _content(other)


def with_generation(item: JsonObject, before: JsonObject) -> JsonObject:
    """Return an EndpointSlice with the next generation if more than its annotations changed."""
    first, second = (one["metadata"].get("labels") or {} for one in (item, before))
    if first != second or _content(item) != _content(before):
        item["metadata"]["generation"] = before["metadata"].get("generation", 0) + 1
    return item


def encoded(resource: Resource, item: JsonObject, version: int) -> Stored:
    """Return an object as it is stored; its managedFields tell only the time of this write."""
    given = item["metadata"] | {"managedFields": [{"operation": "Update", "time": now()}]}
    first = {field: given[field] for field in ("name", "namespace", "uid") if field in given}
    meta = first | {"resourceVersion": ""} | given | {"resourceVersion": str(version)}
    namespace, name = str(meta.get("namespace", "")), str(meta.get("name", ""))
    labels = meta.get("labels")
    return Stored(
        path=resource.path(namespace, name),
        namespace=namespace,
        name=name,
        version=version,
        body=msgspec.json.encode({"metadata": meta} | _content(item)),
        labels=labels if isinstance(labels, dict) else {},
        fields={"metadata.name": name, "metadata.namespace": namespace}
        | {field: _field(item, field) for field in resource.fields},
    )


def decoded(stored: Stored) -> JsonObject:
    """Return a stored object as a new dict, without kind and apiVersion."""
    return msgspec.json.decode(stored.body, type=JsonObject)


def metadata_of(item: JsonObject) -> JsonObject:
    """Return a copy of an object's metadata. Raise a 400 if it is no object."""
    meta = item.get("metadata") or {}
    if not isinstance(meta, dict):
        raise ApiError(400, "metadata must be an object")
    return dict(meta)


def now(later: int = 0) -> str:
    """Return the present time, or that some seconds later, as the API writes it."""
    return (datetime.now(UTC) + timedelta(seconds=later)).strftime("%Y-%m-%dT%H:%M:%SZ")


def grace_seconds(resource: Resource, item: JsonObject, requested: int | None) -> int:
    """Return how long a deleted object waits for its kubelet to confirm: 0 but for pods that run."""
    if resource is not PODS:
        return 0
    spec, phase = item.get("spec") or {}, (item.get("status") or {}).get("phase")
    if not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    return int(spec.get("terminationGracePeriodSeconds", 30) if requested is None else requested)


def _without_nulls(value: Any) -> Any:
    """Return a deep copy without members that are null, which equal absent ones."""
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(element) for element in value] if isinstance(value, list) else value


def _client_metadata(item: JsonObject, verbatim: bool) -> JsonObject:
    """Return the metadata that clients may set."""
    kept = ("deletionTimestamp",) if verbatim else ()
    return {
        name: value for name, value in metadata_of(item).items() if name not in _SERVER_SET or name in kept
    }


def _content(item: JsonObject) -> JsonObject:
    return {name: value for name, value in item.items() if name not in _ENVELOPE}


def _field(item: JsonObject, path: str) -> str:
    """Return a field as text for field selectors: "", or "false" for a boolean, if absent."""
    value: Any = item
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    if path in ("spec.unschedulable", "spec.hostNetwork"):
        return "true" if value is True else "false"
    return value if isinstance(value, str) else ""


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
        return self.patch(resource, namespace, name, lambda item: dict(merged(item, patch)), part=part)

    def patch(
        self, resource: Resource, namespace: str, name: str, patch: Patch, *, part: Part = "all"
    ) -> JsonObject:
        """Replace an object by what a patch makes of it."""
        with self._lock:
            old = self.read(resource, namespace, name)
            return self._replace(resource, old, patch(_typed(resource, old.body)), part, False)

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
        """Remove an object and return its last state; finalizers do not count.

        A pod on a node gets a deletionTimestamp only, and goes when deleted with a `grace` of 0 seconds, which is how a
        kubelet confirms its end. Another `uid` or `version`, if given, is a 409.
        """
        with self._lock:
            old = self.read(resource, namespace, name)
            item = decoded(old)
            meta = item["metadata"]
            if uid not in ("", meta["uid"]) or version not in ("", meta["resourceVersion"]):
                raise conflict(resource, name, "the precondition describes another object")
            seconds = grace_seconds(resource, item, grace)
            if not seconds:
                return self._remove(resource, old)
            if "deletionTimestamp" not in meta:
                meta |= {"deletionTimestamp": now(seconds), "deletionGracePeriodSeconds": seconds}
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
        before = decoded(old)
        if not verbatim:
            admit(resource, item, before, old.path, self._in_use)
        if resource is ENDPOINT_SLICES:
            item = with_generation(item, before)
        if same(item, before):
            return _typed(resource, old.body)  # no new version, no event
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
