"""One tenant creates huge Services: another tenant's changes arrive as usual."""

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pykubeproxy.lab.apiserver import SERVICES
from tests.fakes.cluster import service, slice_of
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
    made_slice = made.api.store.create({**slice_of(name, *_addresses(endpoints)), "ports": listed})
    count = itertools.count()

    def act() -> None:
        nonlocal made_slice
        endpoint = {"addresses": [f"10.7.{next(count) % 250}.9"], "conditions": {"ready": True}}
        changed = [*made_slice["endpoints"][1:], endpoint]
        made_slice = made.api.store.replace(made_slice | {"endpoints": changed})

    return act


def _addresses(number: int) -> list[str]:
    return [f"10.7.{n // 250}.{n % 250 + 1}" for n in range(number)]


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_an_oversized_service_is_quarantined_and_delays_nobody(backend: str, tmp_path: Path) -> None:
    with victim(backend, tmp_path) as made:
        allowed = made.allowed()
        act = huge(made, "huge", "10.96.7.7", OVERSIZED)
        eventually(lambda: "service quarantined" in made.log.read_text(), 30)
        assert made.median_while(act) <= allowed


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_a_large_service_delays_nobody(backend: str, tmp_path: Path) -> None:
    """It is served, but others do not wait for it. On legacy, each commit writes its rules too."""
    with victim(backend, tmp_path) as made:
        allowed = made.allowed() * (1.5 if backend == "legacy" else 1)
        act = huge(made, "large", "10.96.7.7", LARGE)
        assert made.median_while(act) <= allowed


def test_many_services_of_one_namespace_delay_nobody(tmp_path: Path) -> None:
    """A tenant hands half of ten Services of 4750 pairs to another proxy, and takes them back at once."""
    names = [f"s{number}" for number in range(10)]

    def create(made: Victim) -> None:
        for number, name in enumerate(names):
            huge(made, name, f"10.96.7.{number + 1}", (95, 50))

    def label(made: Victim, labels: dict[str, str]) -> None:
        for name in names[:5]:
            found = msgspec.json.decode(made.api.store.read(SERVICES, "default", name).body)
            labelled = found | {"metadata": found["metadata"] | {"labels": labels}}
            made.api.store.replace(labelled | {"apiVersion": "v1", "kind": "Service"})

    with victim("nft", tmp_path, before=create) as made:
        allowed = made.allowed()
        label(made, {"service.kubernetes.io/service-proxy-name": "other"})
        times = [made.change() for _ in range(2)]
        label(made, {})
        times += [made.change() for _ in range(4)]
        assert max(times) <= 3 * allowed
