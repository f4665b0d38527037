"""Decode manifests, with a warning for each faulty document."""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pykubeproxy.config import yaml
from pykubeproxy.objects import Kind, Object, Undecodable, decode, rejection_warning
from pykubeproxy.wording import one_line

# Only commands read Pods, so the agent does not import their decoder.
if TYPE_CHECKING:
    from pykubeproxy.objects.pods import Pod

_API_VERSIONS = {Kind.SERVICE: "v1", Kind.ENDPOINT_SLICE: "discovery.k8s.io/v1", Kind.NODE: "v1"}
_KINDS = {kind.value: kind for kind in Kind}
# The most commas of a JSON text, several times those of the objects of 300,000 endpoints, and the most faulty documents.
_MOST_COMMAS, _MOST_WARNINGS = 12_000_000, 1000
_NOT_BLANK = re.compile(r"\S")
_JSON_TYPES = {b"[": "a list", b'"': "a string", b"t": "a boolean", b"f": "a boolean"}


class InvalidManifest(ValueError):
    """Text that is neither YAML nor JSON; str() is one line with file, line and reason."""


class LocatedObject(NamedTuple):
    """An object and its position, such as "services.yaml:12" or "services.yaml:1 items[3]"."""

    location: str
    object: Object


class ManifestFile(msgspec.Struct, frozen=True):
    """The objects of a file, warnings about faulty documents, and a line for each document of another kind.

    Only commands use `pods`; an unreadable Pod counts as another kind.
    """

    objects: tuple[LocatedObject, ...] = ()
    warnings: tuple[str, ...] = ()
    other_kinds: tuple[str, ...] = ()
    pods: "tuple[Pod, ...]" = ()


class _Head(msgspec.Struct):
    kind: msgspec.Raw = msgspec.Raw()
    apiVersion: msgspec.Raw = msgspec.Raw()  # noqa: N815
    items: msgspec.Raw = msgspec.Raw()


def read(text: bytes, file: str) -> ManifestFile:
    """Decode YAML or JSON documents and the items of Lists. Raises InvalidManifest."""
    reader = _Reader()
    for location, raw in _documents(text, file):
        reader.document(location, raw)
    return ManifestFile(
        tuple(reader.objects), tuple(reader.warnings), tuple(reader.other_kinds), tuple(reader.pods)
    )


def _documents(text: bytes, file: str) -> Iterator[tuple[str, bytes]]:
    """Yield each document as JSON."""
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


class _Reader:
    """Collect the objects of documents."""

    def __init__(self) -> None:
        self.objects: list[LocatedObject] = []
        self.warnings: list[str] = []
        self.other_kinds: list[str] = []
        self.pods: list[Pod] = []

    def document(self, location: str, raw: bytes | msgspec.Raw, list_kind: str = "") -> None:
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
            self.document(f"{location} items[{index}]", raw, kind)

    def _object(self, location: str, raw: bytes | msgspec.Raw, name: str, api_version: str) -> None:
        kind = _KINDS.get(name)
        if name == "Pod" and api_version in ("", "v1") and (pod := _pod(raw)):
            self.pods.append(pod)
        elif kind is None or (api_version and _group(api_version) != _group(_API_VERSIONS[kind])):
            self.other_kinds.append(f"{location}: {one_line(api_version)} {one_line(name)}")
        elif api_version and api_version != _API_VERSIONS[kind]:
            given, expected = one_line(api_version), _API_VERSIONS[kind]
            self._warn(f"{location}: {name} skipped: apiVersion is {given!r}, not {expected!r}")
        else:
            try:
                decoded = decode(kind, raw)
            except Undecodable as error:
                self._warn(f"{location}: {error}")
                return
            self.objects.append(LocatedObject(location, decoded))
            if text := rejection_warning(decoded):
                self.warnings.append(f"{location}: {text}")


def _pod(raw: bytes | msgspec.Raw) -> "Pod | None":
    from pykubeproxy.objects.pods import decode_pod

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
