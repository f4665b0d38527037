"""One tenant asks for session affinity of a huge Service: another tenant's changes arrive as usual."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cluster import service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.victim import Victim, victim

pytestmark = pytest.mark.root

# Ports and endpoints, each pair of which needs a list of clients: as many as a namespace may have.
SHARE = (5, 100)


def sticky(made: Victim, namespace: str, address: str, size: tuple[int, int]) -> dict[str, Any]:
    """Create a Service with session affinity, this many ports and endpoints, and return it."""
    ports, endpoints = size
    numbers = range(1000, 1000 + ports)
    listed = [{"name": f"p{number}", "port": number, "protocol": "TCP"} for number in numbers]
    made_slice = {**slice_of("sticky", *(f"10.7.0.{n + 1}" for n in range(endpoints))), "ports": listed}
    item = service("sticky", clusterIP=address, ports=listed, sessionAffinity="ClientIP")
    _, created = (
        made.api.store.create({**it, "metadata": {**it["metadata"], "namespace": namespace}})
        for it in (made_slice, item)
    )
    return created


@pytest.mark.parametrize(("backend", "size"), [("nft", (400, 120)), ("legacy", (100, 100))])
def test_affinity_of_a_huge_service_delays_nobody(
    backend: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """It is served without, while three other namespaces keep as many lists as they may have."""
    with victim(backend, tmp_path) as made:
        allowed = made.allowed()
        for number in range(3):
            sticky(made, f"tenant{number}", f"10.96.7.{number + 1}", SHARE)
        huge = sticky(made, "attacker", "10.96.8.1", size)
        eventually(lambda: "session affinity not kept" in made.log.read_text(), 60)
        count = itertools.count()

        def act() -> None:
            nonlocal huge
            kind = ("None", "ClientIP")[next(count) % 2]
            huge = made.api.store.replace({**huge, "spec": {**huge["spec"], "sessionAffinity": kind}})

        assert made.median_while(act) <= allowed
        assert sum(1 for _ in Path("/proc/thread-self/net/xt_recent").iterdir()) == 3 * SHARE[0] * SHARE[1]
        assert "service=tenant" not in made.log.read_text()
