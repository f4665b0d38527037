"""Lists page by page, from a server that sends what a test says."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest

from pykubeproxy.sources import Client, wire
from pykubeproxy.sources.failures import Expired, Failure
from pykubeproxy.sources.lists import list_items

_Answer = dict[str, object] | bytes | Failure


class Server:
    """Answers with these pages in turn; `tokens` are those of the requests."""

    def __init__(self, *answers: _Answer) -> None:
        self._answers = iter(answers)
        self.tokens: list[object] = []

    @contextmanager
    def stream(self, path: str, query: Mapping[str, object], **_: Any) -> Iterator[Iterator[bytes]]:
        assert (path, query["labelSelector"], query["limit"]) == ("/api/v1/pods", "a=b", 500)
        self.tokens.append(query.get("continue"))
        answer = next(self._answers)
        if isinstance(answer, Failure):
            raise answer
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        yield (text[i : i + 100] for i in range(0, len(text), 100))


def page(*items: int, then: str = "") -> _Answer:
    return {"kind": "PodList", "metadata": {"resourceVersion": "1", "continue": then}, "items": list(items)}


def listed(server: Server) -> tuple[int, ...]:
    return list_items(cast("Client", server), "/api/v1/pods", "Pod", {"labelSelector": "a=b"}, number)


def number(raw: msgspec.Raw) -> int:
    """Decode an item; 0 cannot be decoded."""
    if decoded := msgspec.json.decode(raw, type=int):
        return decoded
    raise ValueError("0")


def test_all_pages_without_undecodable_items() -> None:
    server = Server(page(1, 0, then="t1"), page(2, then="t2"), page())
    assert listed(server) == (1, 2)
    assert server.tokens == [None, "t1", "t2"]


def test_list_begins_again_once_when_its_rest_has_expired() -> None:
    server = Server(page(1, then="t1"), Expired("410"), page(1, then="t2"), page(2))
    assert listed(server) == (1, 2)
    with pytest.raises(Expired):
        listed(Server(page(1, then="t1"), Expired("410"), Expired("410")))


def test_list_without_end_is_a_failure() -> None:
    with pytest.raises(Failure, match="the same page of a list again and again"):
        listed(Server(page(1, then="t1"), page(2, then="t1")))


def test_empty_pages_without_end_are_a_failure() -> None:
    """After twenty requests, however many pages a server would send."""
    server = Server(*(page(then=f"t{number}") for number in range(100)))
    with pytest.raises(Failure, match="the API server's list has no end: 20 pages with 0 objects in all"):
        listed(server)
    assert len(server.tokens) == 20


def test_requests_are_limited_by_the_objects() -> None:
    """One for each full page of 500, and twenty more."""
    pages = [page(*[1] * (500 if number % 2 else 0), then=f"t{number}") for number in range(38)]
    assert len(listed(Server(*pages, page()))) == 19 * 500
    with pytest.raises(Failure, match="39 pages with 9500 objects in all"):
        listed(Server(*pages, page(then="t")))


def test_objects_that_are_too_large_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with large pods costs a command only these."""
    monkeypatch.setattr(wire.page, "__defaults__", (500,))
    pods = [{"metadata": {"name": f"p{number}", "note": "x" * 200 * (number % 5)}} for number in range(20)]
    text = json.dumps({**page(), "items": pods}, separators=(",", ":")).encode()  # type: ignore[dict-item]
    server = Server(*[text])

    def name(raw: msgspec.Raw) -> str:
        found: str = msgspec.json.decode(raw)["metadata"]["name"]
        return found

    names = list_items(cast("Client", server), "/api/v1/pods", "Pod", {"labelSelector": "a=b"}, name)
    assert names == tuple(f"p{number}" for number in range(20) if number % 5 < 3)


@pytest.mark.parametrize("text", [b"{", b"[]", b"[" * 100_000])
def test_other_answers_are_failures(text: bytes) -> None:
    with pytest.raises(Failure, match="no list of Pods"):
        listed(Server(text))
