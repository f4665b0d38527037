"""What happened to one resource's objects: its present objects, a bounded log of changes, and cursors over that log.

Nothing here locks; the store does, around every call.
"""

import os
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from pykubeproxy.lab.apiserver.errors import too_old


class Stored(msgspec.Struct, frozen=True, eq=False):
    """One version of one object, encoded once. The body is JSON without kind and apiVersion, as in a list."""

    path: str
    namespace: str
    name: str
    version: int
    body: bytes
    labels: Mapping[str, str]
    fields: Mapping[str, str]  # those a field selector may name


class Change:
    """One write: the object before it (None if created) and after it (None if deleted)."""

    __slots__ = ("_farewell", "new", "old", "version")

    def __init__(self, version: int, old: Stored | None, new: Stored | None) -> None:
        self.version = version
        self.old = old
        self.new = new
        self._farewell: bytes | None = None

    def farewell(self) -> bytes:
        """The body that a DELETED event carries: the last state, bearing the version of its end."""
        if self._farewell is None:
            assert self.old is not None
            last = msgspec.json.decode(self.old.body)
            last["metadata"]["resourceVersion"] = str(self.version)
            self._farewell = msgspec.json.encode(last)
        return self._farewell


class Lagging(Exception):
    """The log was trimmed past a cursor: changes it had not read are gone."""


class Cursor:
    """A watcher's place in the log. Its file descriptor becomes readable when there may be something to read."""

    def __init__(self, position: int, after: int, initial: Sequence[Stored]) -> None:
        self.position = position  # index of the next change, counted from the beginning of all changes
        self.after = after  # changes up to this version are of no interest
        self.initial = initial  # the objects that a watch without a version begins with
        self._signal = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # there may be a backlog

    def fileno(self) -> int:
        """For select and poll."""
        return self._signal

    def wake(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._signal, 1)

    def settle(self) -> None:
        """Make the descriptor unreadable until the next wake."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._signal)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._signal)


class History:
    """All that is known of one resource: objects by path, and the changes since version `oldest`."""

    def __init__(self, limit: int, oldest: int) -> None:
        self.objects: dict[str, Stored] = {}
        self.paths: list[str] = []  # sorted
        self.oldest = oldest  # the oldest version one can still watch or list from
        self.cursors: set[Cursor] = set()
        self._limit = limit
        self._changes: list[Change] = []
        self._dropped = 0  # changes that were in the log once

    def apply(self, change: Change) -> None:
        """Make a change the latest one. Its version must be larger than any before."""
        if change.new is None:
            assert change.old is not None
            self._remove(change.old.path)
        else:
            if change.old is None:
                insort(self.paths, change.new.path)
            self.objects[change.new.path] = change.new
        self._changes.append(change)
        if len(self._changes) > self._limit + self._limit // 4:
            self._drop(len(self._changes) - self._limit)

    def present(self) -> list[Stored]:
        """The objects as they are, sorted by path."""
        return [self.objects[path] for path in self.paths]

    def at(self, version: int) -> list[Stored]:
        """The objects as they were at a version, sorted by path. Raises a 410 if that is too long ago."""
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
        """A cursor behind version `after`, or one that starts with the present objects. Raises a 410."""
        if after is None:
            cursor = Cursor(self._dropped + len(self._changes), now, self.present())
        elif after < self.oldest:
            raise too_old(after, self.oldest)
        else:
            skipped = bisect_right(self._changes, after, key=lambda change: change.version)
            cursor = Cursor(self._dropped + skipped, after, ())
        self.cursors.add(cursor)
        return cursor

    def read(self, cursor: Cursor) -> list[Change]:
        """All changes behind the cursor, which moves to the end. Raises Lagging if some are gone."""
        start = cursor.position - self._dropped
        if start < 0:
            raise Lagging
        cursor.position = self._dropped + len(self._changes)
        return [change for change in self._changes[start:] if change.version > cursor.after]

    def forget(self, now: int) -> None:
        """Drop the whole log, as compaction does. Cursors that have read everything go on undisturbed."""
        self._drop(len(self._changes))
        self.oldest = now

    def wake(self) -> None:
        """Tell every cursor that there is something to read."""
        for cursor in self.cursors:
            cursor.wake()

    def _remove(self, path: str) -> None:
        del self.objects[path]
        del self.paths[bisect_right(self.paths, path) - 1]

    def _drop(self, count: int) -> None:
        if count:
            self.oldest = self._changes[count - 1].version
            del self._changes[:count]
            self._dropped += count
