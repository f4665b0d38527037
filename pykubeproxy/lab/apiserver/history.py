"""The objects of one resource, a bounded log of their changes, and cursors over that log.

The store locks around every call.
"""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import msgspec

from pykubeproxy.lab.apiserver.errors import too_old


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
