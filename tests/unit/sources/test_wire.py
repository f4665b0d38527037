"""Lines, pages and events of an API server."""

import msgspec
import pytest

from pykubeproxy.objects import Key, Kind
from pykubeproxy.sources import wire
from pykubeproxy.sources.failures import Expired, Failure, TooLarge, from_status


def test_lines_do_not_depend_on_how_bytes_arrive() -> None:
    """The lines are the same for any size of pieces."""
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

    def endless():
        while True:
            yield b"x" * 1000

    with pytest.raises(Failure, match="more than 5000 bytes") as caught:
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
        wire.page(iter([text]), Kind.SERVICE, [].extend)
    assert "\n" not in str(caught.value)


def test_list_without_items() -> None:
    """Go writes an empty list as null."""
    text = b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1", "continue": ""}, "items": null}'
    items: list[msgspec.Raw] = []
    meta = wire.page(iter([text]), Kind.SERVICE, items.extend)
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
    items: list[msgspec.Raw] = []
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
        meta = wire.page(body, Kind.SERVICE, items.extend)
        assert (meta.resourceVersion, meta.next) == ("1", "x")
        assert [msgspec.json.decode(it) for it in items] == listed


def test_items_are_passed_before_the_page_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory need not hold the text of the whole page; an end that is no JSON is a failure all the same."""
    monkeypatch.setattr(wire, "_BATCH", 100)
    items: list[msgspec.Raw] = []
    held = []

    def body():
        yield b'{"kind":"ServiceList","metadata":{"resourceVersion":"1"},"items":['
        for number in range(100):
            yield b'{"metadata":{"name":"%d"}},' % number
            held.append(number + 1 - len(items))
        yield b"]}"

    with pytest.raises(Failure, match="no list of Services"):
        wire.page(body(), Kind.SERVICE, items.extend)
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
    passed: list[msgspec.Raw] = []
    with pytest.raises(Failure, match="no list of Services"):
        wire.page(iter([head, b'{"metadata":{}},' * 9, b"{}]}"]), Kind.SERVICE, passed.extend)
    assert not passed


def test_comma_after_the_last_item_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after items that begin with no field, whose borders are unknown."""
    monkeypatch.setattr(wire, "_BATCH", 1)
    head = b'{"kind":"ServiceList","metadata":{"resourceVersion":"1"},"items":['
    with pytest.raises(Failure, match="no list of Services"):
        wire.page(iter([head, b'"%s",{"a":1},' % (b"x" * 80), b"]}"]), Kind.SERVICE, [].extend)


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
        wire.page(iter([head, *([b'},{"a":1'] * 10_000)]), Kind.SERVICE, [].extend)
    assert sum(reads) < 4 * 80_000


def test_endless_list_is_a_failure() -> None:
    """Memory is bounded for lists too."""
    with pytest.raises(Failure, match="more than 100 bytes"):
        wire.page(iter([b"[" * 60] * 9), Kind.SERVICE, [].extend, limit=100)


def test_short_list_with_too_many_values_is_a_failure() -> None:
    """Each value takes many times more memory than its byte and its comma in the text."""
    with pytest.raises(TooLarge, match="more than 100 commas"):
        wire.page(iter([b"0," * 50, b"0," * 51]), Kind.SERVICE, [].extend, max_commas=100)


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
    """A Retry-After of an hour is shortened."""
    assert from_status(429, "", 1.0, "services").retry_after == 1.0
    assert from_status(503, "", 3600.0, "services").retry_after == 120.0


def test_object_meta() -> None:
    """Key and version of a faulty object are decoded, without an exception."""
    meta = wire.meta(msgspec.Raw(b'{"spec": 5, "metadata": {"name": "a", "resourceVersion": "7"}}'))
    assert meta.key(Kind.SERVICE) == Key("default", "a")
    assert meta.resourceVersion == "7"
    assert wire.meta(msgspec.Raw(b'{"metadata": 5}')).key(Kind.NODE) == Key("", "?")
