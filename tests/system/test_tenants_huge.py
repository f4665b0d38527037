"""One tenant creates huge Services: another tenant's changes arrive as usual."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cluster import service
from tests.fakes.follower import eventually
from tests.fakes.victim import Victim, victim

pytestmark = pytest.mark.root

# The sizes of a Service, in ports and endpoints: one above maxServicePairs, and one below.
OVERSIZED, LARGE = (5000, 20), (400, 20)


def huge(made: Victim, name: str, address: str, size: tuple[int, int]) -> Callable[[], None]:
    """Create a Service with many ports and endpoints; return a function that changes one endpoint."""
    ports, endpoints = size
    numbers = range(1000, 1000 + ports)
    listed = [{"name": f"p{number}", "port": number, "protocol": "TCP"} for number in numbers]
    made.api.store.create(service(name, clusterIP=address, ports=listed))
    slices = [made.api.store.create(it) for it in _slices(name, listed, endpoints)]
    count = itertools.count()

    def act() -> None:
        endpoint = {"addresses": [f"10.7.{next(count) % 250}.9"], "conditions": {"ready": True}}
        slices[0] = made.api.store.replace(slices[0] | {"endpoints": [*slices[0]["endpoints"][1:], endpoint]})

    return act


def _slices(name: str, ports: list[dict[str, Any]], endpoints: int) -> list[dict[str, Any]]:
    """Return EndpointSlices of 100 ports each, as the API server requires."""
    return [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{name}-{start}",
                "namespace": "default",
                "labels": {"kubernetes.io/service-name": name},
            },
            "addressType": "IPv4",
            "endpoints": [
                {"addresses": [f"10.7.{n // 250}.{n % 250 + 1}"], "conditions": {"ready": True}}
                for n in range(endpoints)
            ],
            "ports": ports[start : start + 100],
        }
        for start in range(0, len(ports), 100)
    ]


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_an_oversized_service_is_quarantined_and_delays_nobody(backend: str, tmp_path: Path) -> None:
    with victim(backend, tmp_path) as made:
        allowed = made.allowed()
        act = huge(made, "huge", "10.96.7.7", OVERSIZED)
        eventually(lambda: "service quarantined" in made.log.read_text(), 30)
        assert made.median_while(act) <= allowed


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_a_large_service_delays_nobody(backend: str, tmp_path: Path) -> None:
    """It is served, but others do not wait for it."""
    with victim(backend, tmp_path) as made:
        allowed = made.allowed()
        act = huge(made, "large", "10.96.7.7", LARGE)
        assert made.median_while(act) <= allowed
