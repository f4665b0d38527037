"""Objects from manifests: a file, a directory or the standard input, read again when they change."""

import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

import msgspec
import structlog
from msgspec.structs import replace

from pykubeproxy.config import yaml
from pykubeproxy.objects import (
    EndpointSlice,
    Key,
    Kind,
    Listed,
    Object,
    Service,
    Undecodable,
    decode,
    rejection_warning,
)
from pykubeproxy.objects.pods import Pod, decode_pod
from pykubeproxy.sources.watch import Emit, Outage, SourceError
from pykubeproxy.wording import one_line

_KINDS = {kind.value: kind for kind in Kind}
# The most commas of a JSON text, several times those of the objects of 300,000 endpoints, and the most faulty documents.
_MOST_COMMAS, _MOST_WARNINGS = 12_000_000, 1000
_NOT_BLANK = re.compile(r"\S")
_JSON_TYPES = {b"[": "a list", b'"': "a string", b"t": "a boolean", b"f": "a boolean"}
_SUFFIXES = (".yaml", ".yml", ".json")
_MOST_BYTES = 512 << 20  # of a file
_PERIOD = 0.5  # seconds between two polls
_SETTLE = 0.1  # seconds without a change before a changed file is read
# A file changed this recently may change again within the same timestamp, in nanoseconds.
_TICK = 50_000_000
_Stamp = tuple[int, int, int, int]
_Stamps = dict[str, _Stamp]

log = structlog.get_logger()


class InvalidManifest(ValueError):
    """Text that is neither YAML nor JSON; str() is one line with file, line and reason."""


class LocatedObject(NamedTuple):
    """An object and its position, such as "services.yaml:12" or "services.yaml:1 items[3]"."""

    location: str
    object: Object


class _Head(msgspec.Struct):
    kind: msgspec.Raw = msgspec.Raw()
    apiVersion: msgspec.Raw = msgspec.Raw()  # noqa: N815
    items: msgspec.Raw = msgspec.Raw()


def _documents(text: bytes, file: str) -> Iterator[tuple[str, bytes]]:
    if text.lstrip()[:1] in (b"{", b"["):
        if text.count(b",") > _MOST_COMMAS:
            raise InvalidManifest(f"{file}: more than {_MOST_COMMAS:,} values; give fewer objects")
        try:
            msgspec.json.decode(text, type=msgspec.Raw)
            yield f"{file}:1", text
            return
        except (ValueError, RecursionError):
            pass
        try:
            yield from list(_json_documents(text, file))
            return
        except InvalidManifest:
            if file.endswith(".json"):
                raise
    yield from _yaml_documents(text, file)


def _json_documents(text: bytes, file: str) -> Iterator[tuple[str, bytes]]:
    """Yield concatenated JSON documents, as two `kubectl get -o json` print them."""
    decoder = json.JSONDecoder()
    line, counted, end = 1, 0, 0
    try:
        characters = text.decode()
        while match := _NOT_BLANK.search(characters, end):
            begin = match.start()
            line, counted = line + characters.count("\n", counted, begin), begin
            _, end = decoder.raw_decode(characters, begin)
            document = characters[begin:end].encode()
            # msgspec is stricter than json: no NaN, no half surrogate pairs.
            msgspec.json.decode(document, type=msgspec.Raw)
            yield f"{file}:{line}", document
    except json.JSONDecodeError as error:
        raise InvalidManifest(f"{file}:{error.lineno}: invalid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(f"{file}:{line}: invalid JSON: {one_line(str(error))}") from None


def _yaml_documents(text: bytes, file: str) -> Iterator[tuple[str, bytes]]:
    try:
        for line, content, _ in yaml.documents(text):
            yield f"{file}:{line}", _encode(content, file, line)
    except InvalidManifest:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{file}:{mark.line + 1}" if mark else file
        problem = one_line(error.problem or error.context or "unreadable")
        raise InvalidManifest(f"{at}: invalid YAML: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidManifest(f"{file}: invalid YAML: {one_line(str(error))}") from None


def _encode(content: object, file: str, line: int) -> bytes:
    try:
        return msgspec.json.encode(content)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidManifest(f"{file}:{line}: no equivalent in JSON: {one_line(str(error))}") from None


def read_manifest(text: bytes, file: str) -> "ManifestFile":
    """Decode YAML or JSON documents and the items of Lists. Raises InvalidManifest."""
    found = ManifestFile()
    for location, raw in _documents(text, file):
        found.add(location, raw)
    return found


class ManifestFile:
    """The objects of a file, and warnings about faulty documents. Documents of other kinds are left out.

    Only commands use `pods`; an unreadable Pod counts as another kind.
    """

    def __init__(self) -> None:
        self.objects: list[LocatedObject] = []
        self.warnings: list[str] = []
        self.pods: list[Pod] = []

    def add(self, location: str, raw: bytes | msgspec.Raw, list_kind: str = "") -> None:
        """Add the objects of one document, or of one item of a List, which need not repeat its kind."""
        head = self._head(location, raw)
        if head is None:
            return
        kind = _string(head.kind) or list_kind
        if not kind:
            self._warn(f"{location}: skipped: {_kind_fault(head.kind)}")
        elif kind.endswith("List") and bytes(head.items):
            self._items(location, head.items, kind.removesuffix("List"))
        else:
            self._object(location, raw, kind, _string(head.apiVersion))

    def _warn(self, warning: str) -> None:
        """Add a warning. Raises InvalidManifest after many: this is no file of objects."""
        if len(self.warnings) >= _MOST_WARNINGS:
            raise InvalidManifest(f"{warning}; and {_MOST_WARNINGS:,} faults before it")
        self.warnings.append(warning)

    def _head(self, location: str, raw: bytes | msgspec.Raw) -> _Head | None:
        """Return the head of an object; None for an empty document, such as one after the last "---"."""
        try:
            return msgspec.json.decode(raw, type=_Head | None)
        except msgspec.DecodeError:
            json_type = _JSON_TYPES.get(bytes(raw).lstrip()[:1], "a number")
            self._warn(f"{location}: skipped: {json_type}, not an object")
            return None

    def _items(self, location: str, items: msgspec.Raw, kind: str) -> None:
        try:
            raws = msgspec.json.decode(items, type=list[msgspec.Raw] | None)
        except ValueError:
            self._warn(f"{location}: skipped: items is not a list")
            return
        for index, raw in enumerate(raws or ()):
            self.add(f"{location} items[{index}]", raw, kind)

    def _object(self, location: str, raw: bytes | msgspec.Raw, name: str, api_version: str) -> None:
        kind = _KINDS.get(name)
        if name == "Pod" and api_version in ("", "v1") and (pod := _pod(raw)):
            self.pods.append(pod)
        elif kind is None or (api_version and _group(api_version) != _group(kind.api_version)):
            pass  # no kind that makes rules
        elif api_version and api_version != kind.api_version:
            given, expected = one_line(api_version), kind.api_version
            self._warn(f"{location}: {name} skipped: apiVersion is {given!r}, not {expected!r}")
        else:
            try:
                decoded = decode(kind, raw)
            except Undecodable as error:
                self._warn(f"{location}: {error}")
                return
            admitted = _admitted(decoded)
            self.objects.append(LocatedObject(location, admitted))
            texts = (rejection_warning(admitted), _unassigned(admitted))
            self.warnings += [f"{location}: {text}" for text in texts if text]


def _admitted(object_: Object) -> Object:
    """Return an object as an API server completes it: without a name, a port of an EndpointSlice has the name ""."""
    if not isinstance(object_, EndpointSlice):
        return object_
    ports = tuple(port if port.name is not None else replace(port, name="") for port in object_.ports)
    return replace(object_, ports=ports)


def _unassigned(object_: Object) -> str:
    """Name what an API server would assign to a Service and a manifest lacks, "" if nothing."""
    if not isinstance(object_, Service) or object_.headless or not object_.ports:
        return ""
    lacks = [] if object_.cluster_ips or object_.rejected else ["clusterIP"]
    if object_.type == "NodePort" and not all(port.node_port for port in object_.ports):
        lacks.append("nodePort")
    what = " and ".join(lacks)
    return (
        what and f"Service {object_.key} has no {what}, which an API server assigns: set it to get its rules"
    )


def _pod(raw: bytes | msgspec.Raw) -> Pod | None:
    try:
        return decode_pod(raw)
    except ValueError:
        return None


def _group(api_version: str) -> str:
    return api_version.rpartition("/")[0]


def _string(raw: msgspec.Raw) -> str:
    """Return the value of a JSON string, "" for other JSON."""
    text = bytes(raw)
    return msgspec.json.decode(text, type=str) if text.startswith(b'"') else ""


def _kind_fault(raw: msgspec.Raw) -> str:
    text = bytes(raw)
    return (
        f"kind is {one_line(text.decode())}" if text and text not in (b"null", b'""') else "kind is missing"
    )


class Manifests(msgspec.Struct, frozen=True):
    """The objects of manifests, warnings about faulty ones, and Pods, of which there are no events."""

    objects: tuple[Object, ...]
    warnings: tuple[str, ...]
    pods: tuple[Pod, ...] = ()

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
            return _merge([read_manifest(_text(sys.stdin.buffer, "<stdin>"), "<stdin>")])
        return _merge([read_manifest(_text_of(name), name) for name in _files(path)])


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
        if self._path == "-":
            for event in self.once():
                emit(event)
            while True:
                time.sleep(_PERIOD)
        with _source_errors(self._path):
            stamps = _settled(self._path, _stamps(self._path))
            self._read(stamps, first=True)
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

    def _poll(self, before: _Stamps) -> _Stamps:
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
            file = read_manifest(text, name)
        except InvalidManifest as error:
            if first:
                raise
            if digest != old_digest:
                log.warning("manifest rejected, previous objects kept", reason=str(error))
            self._files[name] = digest, old
            return
        self._files[name] = digest, file
        self._changed = True

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
