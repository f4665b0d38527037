"""Lists page by page, and when Services last changed, from a server that sends what a test says."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from typing import Any, cast

import msgspec
import pytest

from pykubeproxy.objects import Key
from pykubeproxy.sources import Client, wire
from pykubeproxy.sources.failures import Expired, Failure
from pykubeproxy.sources.queries import last_changes, list_items

_Answer = dict[str, object] | bytes | Failure

WEB = Key("default", "web")


class Server:
    """Answers the lists of each resource with these pages in turn; `requests` are the paths and queries."""

    def __init__(self, **answers: Iterable[_Answer]) -> None:
        self._answers = {resource: iter(pages) for resource, pages in answers.items()}
        self.requests: list[tuple[str, Mapping[str, object]]] = []

    @contextmanager
    def stream(self, path: str, query: Mapping[str, object], **_: Any) -> Iterator[Iterator[bytes]]:
        self.requests.append((path, query))
        answer = next(self._answers[path.rpartition("/")[2]])
        if isinstance(answer, Failure):
            raise answer
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        yield (text[i : i + 100] for i in range(0, len(text), 100))


def pods(*answers: _Answer) -> Server:
    return Server(pods=answers)


def page(*items: object, then: str = "", kind: str = "Pod") -> dict[str, object]:
    metadata = {"resourceVersion": "1", "continue": then}
    return {"kind": f"{kind}List", "metadata": metadata, "items": list(items)}


def listed(server: Server) -> tuple[int, ...]:
    return list_items(cast("Client", server), "/api/v1/pods", "Pod", {"labelSelector": "a=b"}, number)


def number(raw: msgspec.Raw) -> int:
    """Decode an item; 0 cannot be decoded."""
    if decoded := msgspec.json.decode(raw, type=int):
        return decoded
    raise ValueError("0")


def test_all_pages_without_undecodable_items() -> None:
    server = pods(page(1, 0, then="t1"), page(2, then="t2"), page())
    assert listed(server) == (1, 2)
    assert [(path, query["labelSelector"], query["limit"]) for path, query in server.requests] == [
        ("/api/v1/pods", "a=b", 500)
    ] * 3
    assert [query.get("continue") for _, query in server.requests] == [None, "t1", "t2"]


def test_list_begins_again_once_when_its_rest_has_expired() -> None:
    server = pods(page(1, then="t1"), Expired("410"), page(1, then="t2"), page(2))
    assert listed(server) == (1, 2)
    with pytest.raises(Expired):
        listed(pods(page(1, then="t1"), Expired("410"), Expired("410")))


def test_empty_pages_without_end_are_a_failure() -> None:
    """After twenty requests, however many pages a server would send."""
    server = pods(*(page(then=f"t{number}") for number in range(100)))
    with pytest.raises(Failure, match="the API server's list has no end: 20 pages with 0 objects in all"):
        listed(server)
    assert len(server.requests) == 20


def test_requests_are_limited_by_the_objects() -> None:
    """One for each full page of 500, and twenty more."""
    pages = [page(*[1] * (500 if number % 2 else 0), then=f"t{number}") for number in range(38)]
    assert len(listed(pods(*pages, page()))) == 19 * 500
    with pytest.raises(Failure, match="39 pages with 9500 objects in all"):
        listed(pods(*pages, page(then="t")))


def test_objects_that_are_too_large_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant with large pods costs a command only these."""
    monkeypatch.setattr(wire.page, "__defaults__", (500,))
    objects = [{"metadata": {"name": f"p{number}", "note": "x" * 200 * (number % 5)}} for number in range(20)]
    text = json.dumps({**page(), "items": objects}, separators=(",", ":")).encode()
    server = pods(text)

    def name(raw: msgspec.Raw) -> str:
        found: str = msgspec.json.decode(raw)["metadata"]["name"]
        return found

    names = list_items(cast("Client", server), "/api/v1/pods", "Pod", {"labelSelector": "a=b"}, name)
    assert names == tuple(f"p{number}" for number in range(20) if number % 5 < 3)


@pytest.mark.parametrize("text", [b"{", b"[]", b"[" * 100_000])
def test_other_answers_are_failures(text: bytes) -> None:
    with pytest.raises(Failure, match="no list of Pods"):
        listed(pods(text))


def changes(server: Server, *keys: Key) -> Mapping[Key, float]:
    return last_changes(cast("Client", server), keys or (WEB,))


def dated(services: Iterable[_Answer], slices: Iterable[_Answer] | None = None) -> Server:
    return Server(services=services, endpointslices=slices or repeat(page(kind="EndpointSlice")))


def metadata(created: str, *times: str | None) -> dict[str, object]:
    return {"metadata": {"creationTimestamp": created, "managedFields": [{"time": time} for time in times]}}


def test_the_latest_time_of_the_service_and_its_slices_counts() -> None:
    service = metadata("1970-01-01T00:00:10Z", "1970-01-01T00:00:30Z", "1970-01-01T00:00:20Z")
    slices = metadata("1970-01-01T00:00:40Z", None), metadata("1970-01-01T00:00:35Z", None)
    server = dated([page(service, kind="Service")], [page(*slices, kind="EndpointSlice")])
    assert changes(server) == {WEB: 40.0}
    assert [(path, next(iter(query.values()))) for path, query in server.requests] == [
        ("/api/v1/namespaces/default/services", "metadata.name=web"),
        ("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", "kubernetes.io/service-name=web"),
    ]


@pytest.mark.parametrize(
    "services",
    [
        page(kind="Service"),
        Failure("403 Forbidden"),
        b"{",
        page({}, kind="Service"),
        page({"metadata": {"creationTimestamp": "yesterday"}}, kind="Service"),
        page({"metadata": {"creationTimestamp": "1970-01-01T00:00:10"}}, kind="Service"),
        page({"metadata": {"creationTimestamp": "1970-01-01T00:00:10Z"}}, kind="Service"),
    ],
)
def test_a_service_without_a_known_time_is_left_out(services: _Answer) -> None:
    assert changes(dated([services])) == {}


def test_many_services_are_not_asked_for() -> None:
    server = dated(repeat(page(metadata("1970-01-01T00:00:10Z", None), kind="Service")))
    keys = [Key("default", f"service{number}") for number in range(500)]
    assert len(changes(server, *keys)) == 50
    assert len(server.requests) == 100
