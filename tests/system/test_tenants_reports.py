"""A tenant who changes objects all the time fills neither the log nor the API server, and hides no event of others."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import EVENTS, NODES
from tests.fakes.cluster import node, service
from tests.fakes.follower import eventually
from tests.fakes.victim import Victim, victim

pytestmark = pytest.mark.root

SERVER = "192.168.50.1"


def claiming(made: Victim, namespace: str, claims: bool) -> dict[str, Any]:
    """A Service that claims the API server's address, or another one."""
    it = service("claiming", clusterIP="", ports=[{"port": made.api.port}])
    it["metadata"]["namespace"] = namespace
    addresses = [SERVER if claims else "192.0.2.1"]
    address = "10.96.6.6" if namespace == "hostile" else "10.96.6.7"
    return it | {"spec": {**it["spec"], "clusterIP": address, "externalIPs": addresses}}


def repeat(seconds: float, act: Callable[[int], object]) -> int:
    """Act 20 times a second."""
    begun, number = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        act(number)
        number += 1
        time.sleep(0.05)
    return number


def noted(made: Victim, namespace: str) -> list[str]:
    return [it["reason"] for it in made.api.store.list(EVENTS) if it["metadata"]["namespace"] == namespace]


def test_a_toggled_address_hides_no_event_of_others(tmp_path: Path) -> None:
    """Three events are sent of the hostile Service, and no request asks for its UID."""
    with victim("nft", tmp_path, server_address=SERVER) as made:
        uid = made.api.store.create(claiming(made, "hostile", True))["metadata"]["uid"]
        before = len(made.api.requests.entries("list", "services"))
        repeat(8, lambda number: made.api.store.replace(claiming(made, "hostile", number % 2 == 0)))
        made.api.store.create(claiming(made, "other", True))
        eventually(lambda: noted(made, "other") == ["AddressSkipped"], 5)
        assert 1 <= len(noted(made, "hostile")) <= 3
        events = [it for it in made.api.store.list(EVENTS) if it["metadata"]["namespace"] == "hostile"]
        assert {it["regarding"]["uid"] for it in events} == {uid}
        assert len(made.api.requests.entries("list", "services")) == before
        lines = made.log.read_text().count("external address skipped")
        assert 2 <= lines <= 4


def test_hostile_objects_fill_no_log(tmp_path: Path) -> None:
    """Each update has other invalid values; the lines about one Service are limited."""

    def act(number: int) -> None:
        it = service("hostile", clusterIP="10.96.6.6", externalIPs=[f"127.0.0.{number % 250 + 1}"])
        made.api.store.replace(it, verbatim=True)

    with victim("nft", tmp_path) as made:
        made.api.store.create(service("hostile", clusterIP="10.96.6.6"))
        assert repeat(4, act) > 20
        made.change(20)
        lines = made.log.read_text().splitlines()
        assert 1 <= sum("invalid values skipped" in line for line in lines) <= 3


def test_a_node_that_comes_and_goes_fills_no_log(tmp_path: Path) -> None:
    """Hundreds of times in some seconds."""
    with victim("nft", tmp_path) as made:
        before = len(made.log.read_text().splitlines())
        for _ in range(300):
            made.api.store.delete(NODES, "", "node1")
            made.api.store.create(node("node1", "192.168.99.10"))
        made.change(20)
        lines = made.log.read_text().splitlines()[before:]
        assert sum("node deleted, serving with its last state" in line for line in lines) <= 3
        assert len(lines) <= 5, lines
