"""A tenant whose Services need more file descriptors than the agent may open."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import SERVICES
from tests.fakes import process
from tests.fakes.cluster import service
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers
from tests.fakes.victim import Victim, victim

pytestmark = pytest.mark.root

MANY, FIRST_CHECK, VICTIMS_CHECK = 1100, 31000, 30999


def local_service(namespace: str, name: str, check: int) -> dict[str, Any]:
    """A Service with a health check port."""
    made = service(
        name,
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        healthCheckNodePort=check,
        allocateLoadBalancerNodePorts=False,
    )
    return {**made, "metadata": {"name": name, "namespace": namespace}}


def create_many(made: Victim) -> None:
    for number in range(MANY):
        made.api.store.create(local_service("attacker", f"s{number:04}", FIRST_CHECK + number))


def serves(port: int) -> bool:
    try:
        return fetch(port).status == 503  # it has no endpoint
    except ConnectionError:
        return False


def served() -> list[int]:
    """Return the attacker's ports that accept connections."""
    listening = []
    for port in range(FIRST_CHECK, FIRST_CHECK + MANY):
        with socket.socket() as client:
            if not client.connect_ex(("127.0.0.1", port)):
                listening.append(port)
    return listening


def events(made: Victim) -> list[dict[str, Any]]:
    listed = fetch(int(made.api.url.rpartition(":")[2]), "/apis/events.k8s.io/v1/namespaces/attacker/events")
    return json.loads(listed.body)["items"]


def assert_not_disturbed(made: Victim, allowed: float) -> None:
    """The victim's changes arrive in time, pages are served, and no file could not be opened."""
    assert made.median_while(lambda: None) <= allowed
    for port, path in ((HEALTH, "/healthz"), (HEALTH, "/livez"), (METRICS, "/metrics")):
        assert answers(port, path, 200)
    assert serves(VICTIMS_CHECK)
    made.api.faults.drop_connections()
    assert made.change() < 10  # over new connections of the watches
    log = made.log.read_text()
    assert "Too many open files" not in log
    assert "thread died" not in log


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_many_health_check_ports_use_the_hard_limit(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a soft limit below the number of ports, all are served."""
    monkeypatch.setattr(process, "PROGRAM", ("prlimit", "--nofile=1024:4096", *process.PROGRAM))
    with victim(backend, tmp_path) as made:
        made.api.store.create(local_service("victim", "web", VICTIMS_CHECK))
        allowed = made.allowed()
        eventually(lambda: serves(VICTIMS_CHECK))
        create_many(made)
        eventually(lambda: serves(FIRST_CHECK + MANY - 1), 60)
        assert len(served()) == MANY
        assert_not_disturbed(made, allowed)
        assert not events(made)


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_health_check_ports_are_limited_by_open_files(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ports of others stay, newcomers get one, ten Services without one get an event, and one when others go."""
    monkeypatch.setattr(process, "PROGRAM", ("prlimit", "--nofile=1024:1024", *process.PROGRAM))
    with victim(backend, tmp_path, "--iptables-sync-period=5s") as made:
        made.api.store.create(local_service("victim", "web", VICTIMS_CHECK))
        allowed = made.allowed()
        eventually(lambda: serves(VICTIMS_CHECK))
        create_many(made)
        eventually(lambda: "health check ports limited" in made.log.read_text(), 60)
        eventually(lambda: len(events(made)) >= 10, 60)
        before = served()
        assert 650 < len(before) < 700
        assert_not_disturbed(made, allowed)
        made.api.store.create(local_service("newcomer", "web", FIRST_CHECK - 2))
        eventually(lambda: serves(FIRST_CHECK - 2))
        assert set(before) <= set(served())
        (one, *_) = events(made)
        assert one["reason"] == "FailedToStartServiceHealthcheck"
        assert "raise its limit of open files" in one["note"]
        assert len([*Path(f"/proc/{made.pid}/fd").iterdir()]) < 1024 - 128
        gone = before[:50]
        for port in gone:
            made.api.store.delete(SERVICES, "attacker", f"s{port - FIRST_CHECK:04}")
        eventually(lambda: len(served()) >= len(before) - 1, 30)
        assert made.log.read_text().count("health check ports limited") == 1
