"""The text of manifests to objects, with a complaint for whatever is no good."""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import yaml

from pykubeproxy.objects import Kind, Object, Undecodable, decode, remark
from pykubeproxy.sources import yaml12
from pykubeproxy.sources.failures import one_line

_API_VERSIONS = {Kind.SERVICE: "v1", Kind.ENDPOINT_SLICE: "discovery.k8s.io/v1", Kind.NODE: "v1"}
_KINDS = {kind.value: kind for kind in Kind}
_NOT_BLANK = re.compile(r"\S")
_JSON_TYPES = {"[": "a list", '"': "a string", "t": "a boolean", "f": "a boolean"}


class Unparsable(ValueError):
    """Text that is neither YAML nor JSON; str() is one line with the file, the line and the reason."""


class Place(NamedTuple):
    """Where something stands, for messages."""

    file: str
    line: int
    item: int | None = None  # of a List

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + ("" if self.item is None else f" items[{self.item}]")


class Found(NamedTuple):
    """One object and where it stands."""

    place: Place
    object: Object


class Contents(msgspec.Struct, frozen=True):
    """What a file holds: objects, lines about what is no good, and lines about what is of no interest."""

    found: tuple[Found, ...]
    complaints: tuple[str, ...]
    skipped: tuple[str, ...]


class _Head(msgspec.Struct):
    kind: msgspec.Raw = msgspec.Raw()
    apiVersion: msgspec.Raw = msgspec.Raw()  # noqa: N815
    items: msgspec.Raw = msgspec.Raw()


def read(text: bytes, file: str) -> Contents:
    """The objects in a file of YAML or JSON documents, Lists included. Raises Unparsable."""
    reader = _Reader()
    for place, raw in _documents(text, file):
        reader.document(place, raw)
    return Contents(tuple(reader.found), tuple(reader.complaints), tuple(reader.skipped))


def _documents(text: bytes, file: str) -> Iterator[tuple[Place, bytes]]:
    """Every document of the text as JSON."""
    if text.lstrip()[:1] in (b"{", b"["):
        try:
            msgspec.json.decode(text, type=msgspec.Raw)
            yield Place(file, 1), text
            return
        except (ValueError, RecursionError):
            pass
        try:
            yield from list(_json_documents(text, file))
            return
        except Unparsable:
            if file.endswith(".json"):
                raise
    yield from _yaml_documents(text, file)


def _json_documents(text: bytes, file: str) -> Iterator[tuple[Place, bytes]]:
    """One JSON document after the other, as two commands with `-o json` print them."""
    decoder = json.JSONDecoder()
    line, counted, end = 1, 0, 0
    try:
        characters = text.decode()
        while found := _NOT_BLANK.search(characters, end):
            begin = found.start()
            line, counted = line + characters.count("\n", counted, begin), begin
            _, end = decoder.raw_decode(characters, begin)
            document = characters[begin:end].encode()
            # It takes less for JSON than the decoder above: no NaN, and no half of a surrogate pair.
            msgspec.json.decode(document, type=msgspec.Raw)
            yield Place(file, line), document
    except json.JSONDecodeError as error:
        raise Unparsable(f"{file}:{error.lineno}: no JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise Unparsable(f"{file}:{line}: no JSON: {one_line(str(error))}") from None


def _yaml_documents(text: bytes, file: str) -> Iterator[tuple[Place, bytes]]:
    try:
        for line, document in yaml12.documents(text):
            yield Place(file, line), _encoded(document, file, line)
    except Unparsable:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{file}:{mark.line + 1}" if mark else file
        raise Unparsable(
            f"{at}: no YAML: {one_line(error.problem or error.context or 'unreadable')}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unparsable(f"{file}: no YAML: {one_line(str(error))}") from None


def _encoded(document: object, file: str, line: int) -> bytes:
    try:
        return msgspec.json.encode(document)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Unparsable(f"{file}:{line}: cannot be written as JSON: {one_line(str(error))}") from None


class _Reader:
    """Collects what documents hold."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self.complaints: list[str] = []
        self.skipped: list[str] = []

    def document(self, place: Place, raw: bytes | msgspec.Raw, kind_of_list: str = "") -> None:
        """Take in one document, or one item of a List; an item need not repeat its kind."""
        head = self._head(place, raw)
        if head is None:
            return
        kind = _string(head.kind) or kind_of_list
        if not kind:
            self.complaints.append(f"{place}: passed over: it has no kind" + _given(head.kind))
        elif kind.endswith("List") and bytes(head.items):
            self._items(place, head.items, kind.removesuffix("List"))
        else:
            self._object(place, raw, kind, _string(head.apiVersion))

    def _head(self, place: Place, raw: bytes | msgspec.Raw) -> _Head | None:
        first = bytes(raw[:64]).lstrip()[:1].decode("ascii", "replace") if isinstance(raw, bytes) else ""
        first = first or bytes(raw)[:1].decode("ascii", "replace")
        if first == "n":
            return None  # An empty document, such as one after the last "---".
        if first != "{":
            self.complaints.append(
                f"{place}: passed over: it is {_JSON_TYPES.get(first, 'a number')}, not an object"
            )
            return None
        return msgspec.json.decode(raw, type=_Head)

    def _items(self, place: Place, items: msgspec.Raw, kind: str) -> None:
        try:
            raws = msgspec.json.decode(items, type=list[msgspec.Raw] | None)
        except ValueError:
            self.complaints.append(f"{place}: passed over: its items are no list")
            return
        for index, raw in enumerate(raws or ()):
            self.document(place._replace(item=index), raw, kind)

    def _object(self, place: Place, raw: bytes | msgspec.Raw, kind: str, api_version: str) -> None:
        known = _KINDS.get(kind)
        if known is None or (api_version and _group(api_version) != _group(_API_VERSIONS[known])):
            self.skipped.append(f"{place}: {one_line(api_version)} {one_line(kind)} is of no interest")
        elif api_version and api_version != _API_VERSIONS[known]:
            wanted = _API_VERSIONS[known]
            self.complaints.append(
                f"{place}: {kind} is passed over: apiVersion is {one_line(api_version)!r}, not {wanted!r}"
            )
        else:
            try:
                found = Found(place, decode(known, raw))
            except Undecodable as error:
                self.complaints.append(f"{place}: {error}")
                return
            self.found.append(found)
            if line := remark(found.object):
                self.complaints.append(f"{place}: {line}")


def _group(api_version: str) -> str:
    return api_version.rpartition("/")[0]


def _string(raw: msgspec.Raw) -> str:
    """The string this JSON is; empty for anything else."""
    text = bytes(raw)
    return msgspec.json.decode(text, type=str) if text.startswith(b'"') else ""


def _given(raw: msgspec.Raw) -> str:
    text = bytes(raw)
    return f" but {one_line(text.decode())}" if text and text not in (b"null", b'""') else ""
