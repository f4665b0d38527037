"""Objects from manifests: a file, a directory or the standard input, read again when they change."""

import hashlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

import msgspec
import structlog

from pykubeproxy.objects import Key, Kind, Listed, Object
from pykubeproxy.sources.documents import InvalidManifest, LocatedObject, ManifestFile, read
from pykubeproxy.sources.watch import Emit, Outage, SourceError

if TYPE_CHECKING:
    from pykubeproxy.objects.pods import Pod

_SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BYTES = 512 << 20  # of a file
_PERIOD = 0.5  # seconds between two polls
_SETTLE = 0.1  # seconds without a change before a changed file is read
# A file changed this recently may change again within the same timestamp, in nanoseconds.
_TICK = 50_000_000

_Stamp = tuple[int, int, int, int]
_Stamps = dict[str, _Stamp]

log = structlog.get_logger()


class Manifests(msgspec.Struct, frozen=True):
    """The objects of manifests, warnings about faulty ones, and Pods, of which there are no events."""

    objects: tuple[Object, ...]
    warnings: tuple[str, ...]
    pods: "tuple[Pod, ...]" = ()

    def listed(self) -> tuple[Listed, ...]:
        """Return the objects as events."""
        return tuple(
            Listed(kind, tuple(object_ for object_ in self.objects if _kind_of(object_) is kind))
            for kind in Kind
        )


def load_manifests(path: str) -> Manifests:
    """Read a YAML or JSON file, the *.yaml, *.yml and *.json files of a directory, or "-", the standard input.

    Ignore subdirectories. Raises SourceError, in one line, for what cannot be read or parsed.
    """
    with _source_errors(path):
        if path == "-":
            return _merge([read(_text(sys.stdin.buffer, "<stdin>"), "<stdin>")])
        return _merge([read(_text_of(name), name) for name in _files(path)])


class ManifestWatch:
    """Watch manifests. Implements Watch. Poll twice a second, which detects all ways in which editors replace files.

    Keep the objects of a file that no longer parses, and of a missing path. Read the standard input once.
    """

    name = "watch-manifests"
    outage: Outage | None = None  # logged instead
    list_outage: Outage | None = None

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: dict[str, tuple[bytes, ManifestFile]] = {}  # with a digest of the text, by name
        self._changed = True  # since the last emit
        self._warnings: tuple[str, ...] = ()
        self._last_error = ""

    def once(self) -> tuple[Listed, ...]:
        """Read everything and log warnings. Raises SourceError."""
        manifests = load_manifests(self._path)
        for warning in manifests.warnings:
            log.warning("manifest warning", reason=warning)
        return manifests.listed()

    def run(self, emit: Emit) -> NoReturn:
        """Emit the whole state first and after each change. Raises SourceError if the first read fails."""
        with _source_errors(self._path):
            stamps = self._first()
        while True:
            if self._changed:
                self._emit(emit)
            time.sleep(_PERIOD)
            try:
                stamps = self._poll(stamps)
                self._last_error = ""
            except OSError as error:
                reason = str(_unreadable(self._path, error))
                if reason != self._last_error:
                    self._last_error = reason
                    log.warning("manifests unavailable, previous objects kept", reason=reason)

    def _first(self) -> _Stamps:
        if self._path == "-":
            self._files["<stdin>"] = b"", read(_text(sys.stdin.buffer, "<stdin>"), "<stdin>")
            return {}
        stamps = _settled(self._path, _stamps(self._path))
        self._read(stamps, first=True)
        return stamps

    def _poll(self, before: _Stamps) -> _Stamps:
        """Read the files that changed."""
        if self._path == "-":
            return before
        now = _stamps(self._path)
        if now == before and not _is_recent(now):
            return before
        now = _settled(self._path, now) if now != before else now
        self._read(now, first=False)
        return now

    def _read(self, stamps: _Stamps, *, first: bool) -> None:
        for name in self._files.keys() - stamps.keys():
            del self._files[name]
            self._changed = True
        for name in stamps:
            self._read_file(name, first=first)

    def _read_file(self, name: str, *, first: bool) -> None:
        old_digest, old = self._files.get(name, (None, ManifestFile()))
        digest = b""  # of a file that is too large
        try:
            text = _text_of(name)
            digest = hashlib.blake2b(text, digest_size=16).digest()
            if digest == old_digest:
                return
            file = read(text, name)
        except InvalidManifest as error:
            if first:
                raise
            if digest != old_digest:
                log.warning("manifest rejected, previous objects kept", reason=str(error))
            self._files[name] = digest, old
            return
        self._files[name] = digest, file
        self._changed = True
        for line in file.other_kinds:
            log.debug("manifest ignored", kind=line)

    def _emit(self, emit: Emit) -> None:
        manifests = _merge([file for _, file in self._files.values()])
        for warning in manifests.warnings:
            if warning not in self._warnings:
                log.warning("manifest warning", reason=warning)
        self._warnings, self._changed = manifests.warnings, False
        for event in manifests.listed():
            emit(event)


def _text_of(name: str) -> bytes:
    with Path(name).open("rb") as file:
        return _text(file, name)


def _text(file: IO[bytes], name: str) -> bytes:
    """Read a file, which may have no end. Raises InvalidManifest."""
    text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise InvalidManifest(f"{name}: more than {_MOST_BYTES >> 20} MiB; give fewer objects")
    return text


def _files(path: str) -> list[str]:
    if not Path(path).is_dir():
        return [path]
    return sorted(
        str(file)
        for file in Path(path).iterdir()
        if file.suffix in _SUFFIXES and not file.name.startswith(".") and file.is_file()
    )


def _stamps(path: str) -> _Stamps:
    """Return modification time, size, inode and device of each file, through symbolic links."""
    stamps: _Stamps = {}
    for name in _files(path):
        stat = Path(name).stat()
        stamps[name] = stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_dev
    return stamps


def _settled(path: str, stamps: _Stamps) -> _Stamps:
    """Wait until the files stop changing: half a manifest often parses, with objects missing."""
    while True:
        time.sleep(_SETTLE)
        previous, stamps = stamps, _stamps(path)
        if stamps == previous:
            return stamps


def _is_recent(stamps: _Stamps) -> bool:
    now = time.time_ns()
    return any(abs(now - stamp[0]) < _TICK + int(2 * _PERIOD * 1e9) for stamp in stamps.values())


def _unreadable(path: str, error: OSError) -> SourceError:
    return SourceError(f"cannot read manifests {error.filename or path}: {error.strerror or error}")


@contextmanager
def _source_errors(path: str) -> Iterator[None]:
    """Turn an error of a file that cannot be read or parsed into a SourceError."""
    try:
        yield
    except OSError as error:
        raise _unreadable(path, error) from None
    except InvalidManifest as error:
        raise SourceError(f"cannot parse manifests: {error}") from None


def _merge(files: list[ManifestFile]) -> Manifests:
    """Return the objects of all files in order. A later object replaces one of the same kind and name, as in kubectl."""
    warnings = [warning for file in files for warning in file.warnings]
    merged: dict[tuple[Kind, Key], LocatedObject] = {}
    for located in (located for file in files for located in file.objects):
        kind, key = _kind_of(located.object), located.object.key
        if earlier := merged.pop((kind, key), None):
            duplicate = f"{kind.value} {key} skipped: defined again at {located.location}"
            warnings.append(f"{earlier.location}: {duplicate}")
        merged[kind, key] = located
    pods = {pod.key: pod for file in files for pod in file.pods}
    return Manifests(
        tuple(located.object for located in merged.values()), tuple(warnings), tuple(pods.values())
    )


def _kind_of(object_: Object) -> Kind:
    return Kind(type(object_).__name__)
