"""Lines, pages and events of an API server."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest

from pykubeproxy.objects import Key, Kind, ObjectMeta, object_meta
from pykubeproxy.sources import wire
from pykubeproxy.sources.failures import Expired, Failure, from_status

SERVICE = Kind.SERVICE.value


def ignore(items: object) -> None:
    """Take the items of a page that must fail."""


def test_lines_do_not_depend_on_how_bytes_arrive() -> None:
    text = b'{"a": 1}\n\n{"b": "\xc3\xa4"}\n{"c": 3}\n'
    for size in range(1, len(text) + 1):
        body = (text[i : i + size] for i in range(0, len(text), size))
        assert list(wire.lines(body)) == text.split(b"\n")[:-1]


def test_line_that_breaks_off_is_a_failure() -> None:
    """Lines before the break are returned, the incomplete line is not."""
    lines = wire.lines(iter([b"one\ntw", b"o"]))
    assert next(lines) == b"one"
    with pytest.raises(Failure, match="in the middle of an event"):
        next(lines)


def test_endless_line_is_a_failure() -> None:
    """Memory is bounded, and a list follows."""

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 1000

    with pytest.raises(Failure, match="more than 5000 bytes that are no object") as caught:
        next(wire.lines(endless(), limit=5000))
    assert caught.value.persistent


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"<html>",
        b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1"}}',
        b'{"kind": "ServiceList", "metadata": {}, "items": []}',
        b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1"}, "items": {}}',
        b'{"kind": "Status", "metadata": {"resourceVersion": "1"}, "items": []}',
        b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1"}, "items": [{"metadata"',
        b'{"kind": "\\n\\n", "metadata": {"resourceVersion": "1"}, "items": []}',
    ],
)
def test_response_that_is_not_a_list(text: bytes) -> None:
    """Anything but a complete list of the kind is a failure of one line."""
    with pytest.raises(Failure, match="no list of Services") as caught:
        wire.page(iter([text]), SERVICE, ignore)
    assert "\n" not in str(caught.value)


def test_list_without_items() -> None:
    """Go writes an empty list as null."""
    text = b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1", "continue": ""}, "items": null}'
    items: list[Any] = []
    meta = wire.page(iter([text]), SERVICE, items.extend)
    assert not items
    assert not meta.next


# Items with text that looks like the border between two of them.
LOOKALIKES: list[object] = [
    {"metadata": {"name": "a"}, "list": [{"metadata": {"x": 1}}, {"metadata": {"y": [{}, {}]}}]},
    {"metadata": {"name": '"},{"metadata":{"name":"b"}}]}', "items": []}, "more": {"items": [{}, {}]}},
    {"metadata": {"name": "\\"}, "end": "]}"},
    5,
    {"metadata": {"name": "c"}},
]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("indent", [0, 1])
def test_items_do_not_depend_on_how_bytes_arrive(
    monkeypatch: pytest.MonkeyPatch, size: int, batch: int, indent: int
) -> None:
    """Each item is passed once, whole and in order, whatever stands inside of it, and also if white space is added."""
    monkeypatch.setattr(wire, "_BATCH", batch)
    items: list[Any] = []
    for listed in (LOOKALIKES, LOOKALIKES[::-1], []):
        whole = {
            "kind": "ServiceList",
            "metadata": {"resourceVersion": "1", "continue": "x"},
            "items": listed,
        }
        text = msgspec.json.encode(whole)
        text = msgspec.json.format(text, indent=1) if indent else text
        items.clear()
        body = (text[i : i + size] for i in range(0, len(text), size))
        meta = wire.page(body, SERVICE, items.extend)
        assert (meta.resourceVersion, meta.next) == ("1", "x")
        assert [msgspec.json.decode(item) for item in items] == listed


def test_items_are_passed_before_the_page_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory need not hold the text of the whole page; an end that is no JSON is a failure all the same."""
    monkeypatch.setattr(wire, "_BATCH", 100)
    items: list[Any] = []
    held = []

    def body() -> Iterator[bytes]:
        yield b'{"kind":"ServiceList","metadata":{"resourceVersion":"1"},"items":['
        for number in range(100):
            yield b'{"metadata":{"name":"%d"}},' % number
            held.append(number + 1 - len(items))
        yield b"]}"

    with pytest.raises(Failure, match="no list of Services"):
        wire.page(body(), SERVICE, items.extend)
    assert len(items) > 90
    assert max(held) < 10


@pytest.mark.parametrize(
    "head",
    [
        b'{"items":[',
        b'{"kind":"ServiceList","metadata":{"resourceVersion":"1","x":{"items":[',
        b'{"kind":"ServiceList","items":[',
    ],
)
def test_nothing_is_passed_of_a_page_that_may_be_no_list(
    monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """The list may be deep inside, or the kind may follow it."""
    monkeypatch.setattr(wire, "_BATCH", 1)
    passed: list[Any] = []
    with pytest.raises(Failure, match="no list of Services"):
        wire.page(iter([head, b'{"metadata":{}},' * 9, b"{}]}"]), SERVICE, passed.extend)
    assert not passed


def test_comma_after_the_last_item_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after items that begin with no field, whose borders are unknown."""
    monkeypatch.setattr(wire, "_BATCH", 1)
    head = b'{"kind":"ServiceList","metadata":{"resourceVersion":"1"},"items":['
    with pytest.raises(Failure, match="no list of Services"):
        wire.page(iter([head, b'"%s",{"a":1},' % (b"x" * 80), b"]}"]), SERVICE, ignore)


def test_text_is_not_read_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What seems to be the end of an item may be none, for the whole length of a page."""
    monkeypatch.setattr(wire, "_BATCH", 10)
    reads = []

    class Items:
        def decode(self, text: bytes) -> list[msgspec.Raw]:
            reads.append(len(text))
            raise ValueError("an open bracket")

    monkeypatch.setattr(wire, "_items", Items())
    head = b'{"kind":"ServiceList","metadata":{"resourceVersion":"1"},"items":[[{"a":1'
    with pytest.raises(Failure, match="no list of Services"):
        wire.page(iter([head, *([b'},{"a":1'] * 10_000)]), SERVICE, ignore)
    assert sum(reads) < 4 * 80_000


def test_endless_list_is_a_failure() -> None:
    """Memory is bounded for lists too."""
    with pytest.raises(Failure, match="more than 100 bytes that are no object"):
        wire.page(iter([b"[" * 60] * 9), SERVICE, ignore, limit=100)


HEAD = b'{"kind":"ServiceList","metadata":{"resourceVersion":"1","continue":"x"},"items":['


def named(name: str, filling: object = "") -> bytes:
    """Return an object whose filling looks like other objects with other names."""
    meta = {
        "name": name,
        "namespace": "ns",
        "resourceVersion": "7",
        "labels": {"name": "l", "namespace": "l"},
    }
    return msgspec.json.encode({"metadata": meta, "spec": {"externalName": filling}})


LARGE = '},{"metadata":{"name":"z"}}]}' * 50


def pieces(text: bytes, size: int) -> Iterator[bytes]:
    return (text[i : i + size] for i in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 13, 100])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_an_item_that_is_too_large_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch, size: int, place: int
) -> None:
    """Its name and version are known, wherever it is in the list, and the others are complete."""
    monkeypatch.setattr(wire, "IDENTITY_BYTES", 150)
    objects = [named("a"), named("b", "," * 300), named("c")]
    objects.insert(place, named("large", LARGE))
    items: list[wire.Item] = []
    meta = wire.page(pieces(HEAD + b",".join(objects) + b"]}\n", size), SERVICE, items.extend, limit=600)
    assert meta.next == "x"
    assert [bytes(item) for item in items] == [item[:150] if b"large" in item else item for item in objects]
    (truncated,) = (item for item in items if isinstance(item, wire.Truncated))
    assert object_meta(truncated) == ObjectMeta("large", "ns", "7")


@pytest.mark.parametrize(("end", "valid"), [(b"]}", True), (b"]", False), (b"", False)])
def test_many_items_that_are_too_large(end: bytes, valid: bool) -> None:
    """Each costs only itself, and a list that breaks off inside of one is no list."""
    objects = [named(f"s{number}", "x" * 1000 if number % 3 else "") for number in range(99)]
    items: list[wire.Item] = []
    with nullcontext() if valid else pytest.raises(Failure, match="no list of Services"):
        wire.page(pieces(HEAD + b",".join(objects) + end, 90), SERVICE, items.extend, 500)
    assert [object_meta(item).name for item in items] == [f"s{number}" for number in range(99)]


def test_text_of_an_item_that_is_too_large_is_dropped() -> None:
    held = []
    text = wire._PageText(500)
    text.add(HEAD)
    for piece in [named("a", "x")[:-3], *[b"x" * 100] * 2000]:
        text.add(piece)
        held.append(len(text._text))
    assert max(held) <= 600


def test_commas_in_strings_do_not_count() -> None:
    """A tenant may write an externalName of 1.4 million commas; four of them once broke every list."""
    text = HEAD + b",".join(named(f"s{number}", "," * 1_400_000) for number in range(4)) + b"]}"
    items: list[wire.Item] = []
    wire.page(pieces(text, 65536), SERVICE, items.extend)
    assert [object_meta(item).name for item in items] == ["s0", "s1", "s2", "s3"]
    assert not any(isinstance(item, wire.Truncated) for item in items)


@pytest.mark.parametrize("size", [1, 7, 90, 900])
def test_a_line_that_is_too_long_costs_only_itself(size: int) -> None:
    """Type, name and version are known, however the bytes arrive."""
    texts = [named("a"), named("large", "x" * 2000), named("b")]
    text = b"".join(b'{"type":"MODIFIED","object":%s}\n' % item for item in texts)
    events = [wire.event(line) for line in wire.lines(pieces(text, size), limit=1000)]
    assert [(item.type, object_meta(item.object).name) for item in events] == [
        ("MODIFIED", "a"),
        ("MODIFIED", "large"),
        ("MODIFIED", "b"),
    ]
    assert object_meta(events[1].object) == ObjectMeta("large", "ns", "7")
    assert [isinstance(item.object, wire.Truncated) for item in events] == [False, True, False]


def nested(depth: int) -> bytes:
    """Return an object with fields of a manager below one another, as any user may write them."""
    fields = b'{"f:a":' * depth + b"{}" + b"}" * depth
    return named("nested").replace(b'"7"', b'"7","managedFields":[{"fieldsV1":%s}]' % fields)


@pytest.mark.parametrize("depth", [*range(900, 1000, 9), 9990])
@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("count", [2, 2000])
def test_an_object_that_is_nested_too_deeply_costs_only_itself(depth: int, place: int, count: int) -> None:
    """In a list of one or several batches, and in a watch. Below that depth, it is served."""
    objects = [named(f"s{number}", "x" * 100) for number in range(count)]
    objects.insert(place, nested(depth))
    items: list[wire.Item] = []
    wire.page(pieces(HEAD + b",".join(objects) + b"]}\n", 65536), SERVICE, items.extend)
    assert [object_meta(item).name for item in items] == [
        object_meta(msgspec.Raw(item)).name for item in objects
    ]
    line = wire.event(b'{"type":"ADDED","object":%s}' % nested(depth))
    assert object_meta(line.object) == ObjectMeta("nested", "ns", "7")
    if depth > 1000:
        reason = "it is nested too deeply"
        assert [wire.too_large(item) for item in (line.object, *items) if wire.too_large(item)] == [
            reason
        ] * 2


def test_nested_text_that_is_no_object_is_a_failure() -> None:
    deep = b"[" * 100_000
    with pytest.raises(Failure, match="no list of Services"):
        wire.page(iter([deep]), SERVICE, ignore)
    with pytest.raises(Failure, match="no list of Services"):
        wire.page(iter([HEAD + deep]), SERVICE, ignore)
    with pytest.raises(Failure, match="an invalid event"):
        wire.event(deep)


@pytest.mark.parametrize(
    ("status", "expired"),
    [
        ({"code": 410, "reason": "Expired", "message": "too old"}, True),
        ({"reason": "Gone"}, True),
        ({"code": 500, "message": "boom\nbang"}, False),
        ({}, False),
        ([], False),
    ],
)
def test_error_events(status: object, expired: bool) -> None:
    """An ERROR event is a failure; only code 410 means an expired version."""
    with pytest.raises(Failure) as caught:
        wire.event(msgspec.json.encode({"type": "ERROR", "object": status}))
    assert isinstance(caught.value, Expired) is expired
    assert caught.value.persistent
    assert "\n" not in str(caught.value)


def test_retry_after_is_bounded() -> None:
    assert from_status(429, "", 1.0, "services").retry_after == 1.0
    assert from_status(503, "", 3600.0, "services").retry_after == 120.0


def test_object_meta() -> None:
    """Key and version of a faulty object are decoded, without an exception."""
    meta = object_meta(msgspec.Raw(b'{"spec": 5, "metadata": {"name": "a", "resourceVersion": "7"}}'))
    assert meta.key(Kind.SERVICE) == Key("default", "a")
    assert meta.resourceVersion == "7"
    assert object_meta(msgspec.Raw(b'{"metadata": 5}')).key(Kind.NODE) == Key("", "?")
