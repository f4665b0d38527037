"""Lists page by page, from a server that sends what a test says."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest

from pykubeproxy.sources import Client
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
        yield iter([answer if isinstance(answer, bytes) else json.dumps(answer).encode()])


def page(*items: int, then: str = "") -> _Answer:
    return {"metadata": {"continue": then}, "items": list(items)}


def listed(server: Server) -> tuple[int, ...]:
    return list_items(cast("Client", server), "/api/v1/pods", {"labelSelector": "a=b"}, number)


def number(raw: msgspec.Raw) -> int:
    """Decode an item; 0 cannot be decoded."""
    if decoded := msgspec.json.decode(raw, type=int):
        return decoded
    raise ValueError("0")


def test_all_pages_without_undecodable_items() -> None:
    server = Server(page(1, 0, then="t1"), page(2, then="t2"), {"items": None})
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


@pytest.mark.parametrize("text", [b"{", b"[]", b"[" * 100_000])
def test_other_answers_are_failures(text: bytes) -> None:
    with pytest.raises(Failure, match="no list of pods"):
        listed(Server(text))
