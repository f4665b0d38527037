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
        wire.page(iter([text]), Kind.SERVICE)
    assert "\n" not in str(caught.value)


def test_list_without_items() -> None:
    """Go writes an empty list as null."""
    text = b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1", "continue": ""}, "items": null}'
    page = wire.page(iter([text]), Kind.SERVICE)
    assert page.items is None
    assert not page.metadata.next


def test_endless_list_is_a_failure() -> None:
    """Memory is bounded for lists too."""
    with pytest.raises(Failure, match="more than 100 bytes"):
        wire.page(iter([b"[" * 60] * 9), Kind.SERVICE, limit=100)


def test_short_list_with_too_many_values_is_a_failure() -> None:
    """Each value takes many times more memory than its byte and its comma in the text."""
    with pytest.raises(TooLarge, match="more than 100 commas"):
        wire.page(iter([b"0," * 50, b"0," * 51]), Kind.SERVICE, max_commas=100)


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
