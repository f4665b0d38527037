"""What a watch has told of the objects of its kind, so that each of them is told of rightly, and complained of once."""

from collections.abc import Iterable, Iterator

import msgspec

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
    remark,
)
from pykubeproxy.sources import wire
from pykubeproxy.sources.backoff import log


class Intake:
    """Decodes the objects of one kind, list by list and change by change."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._known: set[Key] = set()
        self._versions: dict[Key, int] = {}  # of the objects that the present watch has told of
        self._refused: dict[Key, str] = {}  # in which version an object was no good
        self._remarks: dict[Key, str] = {}

    def objects(self, items: Iterable[msgspec.Raw], refused: dict[Key, str]) -> Iterator[Object]:
        """Those of a page of a list that are good; the others are noted in `refused` with their versions."""
        for raw in items:
            it = self._decode(raw, refused)
            if it is not None:
                yield it

    def listed(self, objects: tuple[Object, ...], refused: dict[Key, str]) -> Listed:
        """All pages of a list: this is all there is."""
        self._refused = refused
        self._known = {it.key for it in objects}
        self._remarks = {key: it for key, it in self._remarks.items() if key in self._known}
        return Listed(self._kind, objects)

    def watching(self) -> None:
        """A new watch begins, in which any version of an object may come first."""
        self._versions.clear()

    def is_overtaken(self, key: Key, version: str) -> bool:
        """Whether this watch has told of a later version of the object, so that this one is the past.

        Versions of built-in kinds are whole numbers that grow (KEP-5504); of others nothing is known.
        """
        if not (version.isascii() and version.isdigit() and len(version) < 20):
            return False
        number = int(version)
        if number < self._versions.get(key, number):
            return True
        self._versions[key] = number
        return False

    def changed(self, raw: msgspec.Raw, key: Key) -> Event | None:
        """What it means that an object was added or modified; None if nothing."""
        it = self._decode(raw, self._refused)
        if it is None:
            return self.gone(key, forget=False)
        self._refused.pop(it.key, None)
        self._known.add(it.key)
        return Updated(it)

    def gone(self, key: Key, *, forget: bool = True) -> Event | None:
        """What it means that an object is not there any more, or unless `forget` is no good any more; None if nothing."""
        if forget:
            self._refused.pop(key, None)
        if key not in self._known:
            return None
        self._remarks.pop(key, None)
        self._known.remove(key)
        return Deleted(self._kind, key)

    def _decode(self, raw: msgspec.Raw, refused: dict[Key, str]) -> Object | None:
        """Decode an object; one that is no good is noted in `refused` and complained about once for each version."""
        try:
            it = decode(self._kind, raw)
        except Undecodable as error:
            meta = wire.meta(raw)
            key, version = meta.key(self._kind), meta.resourceVersion or ""
            if self._refused.get(key) != version:
                log.warning(str(error), version=version)
            refused[key] = self._refused[key] = version
            return None
        self._remark(it)
        return it

    def _remark(self, it: Object) -> None:
        """Complain about addresses that are passed over, once for as long as they are the same."""
        line = remark(it)
        if line and line != self._remarks.get(it.key):
            log.warning(line)
            self._remarks[it.key] = line
        elif not line:
            self._remarks.pop(it.key, None)
