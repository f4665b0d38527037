"""Decode the objects of one kind, and track which of them were emitted."""

from collections.abc import Iterable, Iterator

import structlog

from pykubeproxy.objects import (
    Deleted,
    Event,
    Key,
    Kind,
    Listed,
    Object,
    Undecodable,
    Updated,
    decode,
    object_meta,
    rejection_warning,
)
from pykubeproxy.sources import wire

log = structlog.get_logger()


class ObjectTracker:
    """Turn the objects of lists and watches into events, and log each faulty object once per version."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._emitted: set[Key] = set()
        self._rejected: dict[Key, str] = {}  # versions that cannot be decoded
        self._remarks: dict[Key, str] = {}
        self._too_large: dict[Key, str] = {}  # why, for those not reported yet

    def decode_page(self, items: Iterable[wire.Item], rejected: dict[Key, str]) -> Iterator[Object]:
        """Yield the valid objects of a page of a list; add the version of each other one to `rejected`."""
        for raw in items:
            if (decoded := self._decode(raw, rejected)) is not None:
                yield decoded

    def listed(self, objects: tuple[Object, ...], rejected: dict[Key, str]) -> Listed:
        """Replace the state with that of a complete list, and return its event."""
        self._rejected = rejected
        # An earlier list that failed may have found others, which are smaller by now.
        self._too_large = {key: why for key, why in self._too_large.items() if key in rejected}
        self._emitted = {object_.key for object_ in objects}
        self._remarks = {key: remark for key, remark in self._remarks.items() if key in self._emitted}
        return Listed(self._kind, objects)

    def too_large(self) -> Iterator[Deleted]:
        """Yield an event for each object of the last list that is too large and has not been reported."""
        while self._too_large:
            yield Deleted(self._kind, *self._too_large.popitem())

    def updated(self, raw: wire.Item, key: Key) -> Event | None:
        """Return the event for an added or modified object. One that cannot be decoded counts as deleted."""
        decoded = self._decode(raw, self._rejected)
        if decoded is None:
            removed = self._removed(key)
            return Deleted(self._kind, key, self._too_large.pop(key)) if key in self._too_large else removed
        self._rejected.pop(decoded.key, None)
        self._emitted.add(decoded.key)
        return Updated(decoded)

    def deleted(self, key: Key) -> Event | None:
        """Return the event for a deleted object, None if it was not emitted."""
        self._rejected.pop(key, None)
        return self._removed(key)

    def _removed(self, key: Key) -> Event | None:
        if key not in self._emitted:
            return None
        self._remarks.pop(key, None)
        self._emitted.remove(key)
        return Deleted(self._kind, key)

    def _decode(self, raw: wire.Item, rejected: dict[Key, str]) -> Object | None:
        try:
            if too_large := wire.too_large(raw):
                raise Undecodable(self._kind, object_meta(raw), too_large)
            decoded = decode(self._kind, raw)
        except Undecodable as error:
            meta = object_meta(raw)
            key, version = meta.key(self._kind), meta.resourceVersion or ""
            if self._rejected.get(key) != version:
                log.warning("object skipped", about=key, reason=str(error), version=version)
                if too_large:
                    self._too_large[key] = too_large
            rejected[key] = self._rejected[key] = version
            return None
        self._log_remark(decoded)
        return decoded

    def _log_remark(self, decoded: Object) -> None:
        """Log invalid values, and again only when they change."""
        text = rejection_warning(decoded)
        if not text:
            self._remarks.pop(decoded.key, None)
        elif text != self._remarks.get(decoded.key):
            log.warning("invalid values skipped", about=decoded.key, reason=text)
            self._remarks[decoded.key] = text
