"""When Services last changed, from what the API server notes about them and their EndpointSlices."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pytest

from pykubeproxy.objects import Key
from pykubeproxy.sources import Client
from pykubeproxy.sources.changes import last_changes
from pykubeproxy.sources.failures import Failure

WEB = Key("default", "web")


class Server:
    """Answers lists of services and endpointslices with these metadata; `asked` are the paths and selectors."""

    def __init__(self, services: object, slices: object = ()) -> None:
        self._bodies = {"services": services, "endpointslices": slices}
        self.asked: list[tuple[str, str]] = []

    @contextmanager
    def stream(self, path: str, query: Mapping[str, str], **_: Any) -> Iterator[Iterator[bytes]]:
        self.asked.append((path, next(iter(query.values()))))
        found = self._bodies[path.rpartition("/")[2]]
        if found is None:
            raise Failure("403 Forbidden")
        kind = "Service" if path.endswith("/services") else "EndpointSlice"
        page = {"kind": f"{kind}List", "metadata": {"resourceVersion": "1"}, "items": found}
        text = found if isinstance(found, bytes) else json.dumps(page).encode()
        yield iter([text[:7], text[7:]])


def changes(server: Server, *keys: Key) -> Mapping[Key, float]:
    return last_changes(cast("Client", server), keys or (WEB,))


def metadata(created: str, *times: str | None) -> dict[str, object]:
    return {"metadata": {"creationTimestamp": created, "managedFields": [{"time": it} for it in times]}}


def test_the_latest_time_of_the_service_and_its_slices_counts() -> None:
    server = Server(
        [metadata("1970-01-01T00:00:10Z", "1970-01-01T00:00:30Z", "1970-01-01T00:00:20Z")],
        [metadata("1970-01-01T00:00:40Z", None), metadata("1970-01-01T00:00:35Z", None)],
    )
    assert changes(server) == {WEB: 40.0}
    assert server.asked == [
        ("/api/v1/namespaces/default/services", "metadata.name=web"),
        ("/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", "kubernetes.io/service-name=web"),
    ]


@pytest.mark.parametrize(
    "services",
    [
        [],
        None,
        b"{",
        [{}],
        [{"metadata": {"creationTimestamp": "yesterday"}}],
        [{"metadata": {"creationTimestamp": "1970-01-01T00:00:10"}}],
        [{"metadata": {"creationTimestamp": "1970-01-01T00:00:10Z"}}],
    ],
)
def test_a_service_without_a_known_time_is_left_out(services: object) -> None:
    assert changes(Server(services)) == {}


def test_many_services_are_not_asked_for() -> None:
    server = Server([metadata("1970-01-01T00:00:10Z", None)])
    keys = [Key("default", f"service{it}") for it in range(500)]
    assert len(changes(server, *keys)) == 50
    assert len(server.asked) == 100
