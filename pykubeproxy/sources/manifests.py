"""Objects from manifests: a file, a folder or the standard input, read again when they change."""

import hashlib
import os
import select
import sys
import threading
import time
from pathlib import Path

import msgspec

from pykubeproxy.objects import Key, Kind, Listed, Object
from pykubeproxy.sources.backoff import log
from pykubeproxy.sources.documents import Contents, Found, Unparsable, read
from pykubeproxy.sources.watch import Emit, SourceError, Trouble

_SUFFIXES = (".yaml", ".yml", ".json")
_PERIOD = 0.5  # seconds between two looks
_SETTLE = 0.1  # a change is believed when a second look so many seconds later finds the same
# A file changed this recently may change again without its time stamp showing it, in nanoseconds.
_TICK = 50_000_000

_Stamp = tuple[int, int, int, int]
_Stamps = dict[str, _Stamp]


class Manifests(msgspec.Struct, frozen=True):
    """What manifests hold. `complaints` are lines about objects that are no good and were passed over."""

    objects: tuple[Object, ...]
    complaints: tuple[str, ...]

    def listed(self) -> tuple[Listed, ...]:
        """The same as events."""
        return tuple(Listed(kind, tuple(it for it in self.objects if _kind_of(it) is kind)) for kind in Kind)


def load_manifests(path: str) -> Manifests:
    """Read a YAML or JSON file, the *.yaml, *.yml and *.json files of a folder, or "-", the standard input.

    Subfolders are left alone. Raises SourceError, in one line, for what cannot be read or parsed.
    """
    if path == "-":
        return _merged([_parsed(sys.stdin.buffer.read(), "<stdin>")])
    try:
        return _merged([_parsed(Path(name).read_bytes(), name) for name in _files(path)])
    except OSError as error:
        raise _unreadable(path, error) from None


class ManifestWatch:
    """Watches manifests; a Watch. It looks twice a second: polling sees every way in which editors replace files.

    A file that no longer parses keeps what it held before, and so does a path that is gone.
    """

    name = "watch-manifests"
    trouble: Trouble | None = None  # what cannot be read is told of in the log

    def __init__(self, path: str) -> None:
        self._path = path
        self._stopping = threading.Event()
        self._contents: dict[str, tuple[bytes, Contents]] = {}  # with a digest of what was read, by file
        self._changed = True  # since the last time it was told
        self._complaints: tuple[str, ...] = ()
        self._warned = ""

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    def once(self) -> tuple[Listed, ...]:
        """Read everything; what is passed over is logged. Raises SourceError."""
        manifests = load_manifests(self._path)
        for complaint in manifests.complaints:
            log.warning(complaint)
        return manifests.listed()

    def run(self, emit: Emit) -> None:
        """Emit the whole state at first and whenever a file changed, until `stop`. Raises SourceError at first."""
        try:
            stamps = self._first()
        except OSError as error:
            raise _unreadable(self._path, error) from None
        while not self._stopping.is_set():
            if self._changed:
                self._emit(emit)
            self._stopping.wait(_PERIOD)
            try:
                stamps = self._look(stamps)
                self._warned = ""
            except OSError as error:
                self._warn_once(f"{_unreadable(self._path, error)}; what was read before stays")

    def _first(self) -> _Stamps:
        """Read everything for the first time."""
        if self._path == "-":
            text = self._stdin()
            if not self._stopping.is_set():
                self._contents["<stdin>"] = b"", _parsed(text, "<stdin>")
            return {}
        stamps = self._settled(_stamps(self._path))
        self._read(stamps, first=True)
        return stamps

    def _look(self, before: _Stamps) -> _Stamps:
        """Read what has changed since the last look."""
        if self._path == "-":
            return before
        now = _stamps(self._path)
        if now == before and not _fresh(now):
            return before
        now = self._settled(now) if now != before else now
        self._read(now, first=False)
        return now

    def _settled(self, stamps: _Stamps) -> _Stamps:
        """Wait until nothing changes any more: a manifest written by halves often parses, with objects missing."""
        while not self._stopping.wait(_SETTLE):
            again = _stamps(self._path)
            if again == stamps:
                break
            stamps = again
        return stamps

    def _read(self, files: _Stamps, *, first: bool) -> None:
        for name in self._contents.keys() - files.keys():
            del self._contents[name]
            self._changed = True
        for name in files:
            self._read_file(name, first=first)

    def _read_file(self, name: str, *, first: bool) -> None:
        text = Path(name).read_bytes()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        old_digest, old = self._contents.get(name, (b"", Contents((), (), ())))
        if digest == old_digest:
            return
        try:
            contents = read(text, name)
        except Unparsable as error:
            if first:
                raise SourceError(f"manifests cannot be parsed: {error}") from None
            log.warning(f"{error}; what it held before stays")
            self._contents[name] = digest, old
            return
        self._contents[name] = digest, contents
        self._changed = True
        for line in contents.skipped:
            log.debug(line)

    def _emit(self, emit: Emit) -> None:
        manifests = _merged([contents for _, contents in self._contents.values()])
        for complaint in manifests.complaints:
            if complaint not in self._complaints:
                log.warning(complaint)
        self._complaints, self._changed = manifests.complaints, False
        for event in manifests.listed():
            emit(event)

    def _stdin(self) -> bytes:
        """All of the standard input, or as much of it as came before `stop`."""
        text, source = bytearray(), sys.stdin.fileno()
        while not self._stopping.is_set():
            if select.select([source], [], [], _PERIOD)[0]:
                piece = os.read(source, 1 << 16)
                if not piece:
                    break
                text += piece
        return bytes(text)

    def _warn_once(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            log.warning(text)


def _files(path: str) -> list[str]:
    if not Path(path).is_dir():
        return [path]
    return sorted(
        str(it)
        for it in Path(path).iterdir()
        if it.suffix in _SUFFIXES and not it.name.startswith(".") and it.is_file()
    )


def _stamps(path: str) -> _Stamps:
    """What tells whether a file is still the same, for each file; symbolic links are followed."""
    stamps: _Stamps = {}
    for name in _files(path):
        it = Path(name).stat()
        stamps[name] = it.st_mtime_ns, it.st_size, it.st_ino, it.st_dev
    return stamps


def _fresh(stamps: _Stamps) -> bool:
    now = time.time_ns()
    return any(abs(now - stamp[0]) < _TICK + int(2 * _PERIOD * 1e9) for stamp in stamps.values())


def _unreadable(path: str, error: OSError) -> SourceError:
    return SourceError(f"manifests {error.filename or path} cannot be read: {error.strerror or error}")


def _parsed(text: bytes, name: str) -> Contents:
    try:
        return read(text, name)
    except Unparsable as error:
        raise SourceError(f"manifests cannot be parsed: {error}") from None


def _merged(contents: list[Contents]) -> Manifests:
    """The objects of all files, in order. Of two with the same kind and name the later one counts, as with kubectl."""
    complaints = [complaint for it in contents for complaint in it.complaints]
    found: dict[tuple[Kind, Key], Found] = {}
    for it in (it for content in contents for it in content.found):
        kind, key = _kind_of(it.object), it.object.key
        earlier = found.pop((kind, key), None)
        if earlier:
            complaints.append(
                f"{earlier.place}: {kind.value} {key} is passed over: it is given again at {it.place}"
            )
        found[kind, key] = it
    return Manifests(tuple(it.object for it in found.values()), tuple(complaints))


def _kind_of(it: Object) -> Kind:
    return Kind(type(it).__name__)
