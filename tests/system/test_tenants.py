"""One tenant writes huge, many or costly objects: the changes of another tenant arrive as usual."""

import itertools
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, EVENTS, SERVICES
from tests.fakes import process
from tests.fakes.cluster import service, slice_of
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, metric, tool
from tests.fakes.victim import Victim, dual_stack, victim
from tests.fakes.waiting import eventually
from tests.hostile import nested_addresses

pytestmark = pytest.mark.root

QUARANTINED = 'pykubeproxy_services_quarantined{ip_family="IPv4"}'
# The rules of Services named bad-… use a counter that does not exist.
REJECTED = r"/default\/bad-[0-9]* cluster IP/s/ -m tcp / -m tcp -m nfacct --nfacct-name nobody /"


@pytest.fixture(scope="module", params=["nft", "legacy"])
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """One agent for all attacks."""
    folder = tmp_path_factory.mktemp("victim")
    with victim(request.param, folder) as made:
        made.measure()
        yield made


@pytest.fixture
def made(attacked: Victim) -> Iterator[Victim]:
    """The victim; all other objects are deleted after the test."""
    yield attacked
    for resource in (SERVICES, ENDPOINT_SLICES):
        for item in attacked.api.store.list(resource):
            namespace, name = item["metadata"]["namespace"], item["metadata"]["name"]
            if not name.startswith("victim"):
                attacked.api.store.delete(resource, namespace, name)
    attacked.change()


def ports(count: int) -> list[dict[str, Any]]:
    return [{"name": f"p{number}", "port": 1000 + number, "protocol": "TCP"} for number in range(count)]


# Ports and endpoints, each pair of which needs a list of clients: as many as a namespace may have.
SHARE = (5, 100)


def sticky(made: Victim, namespace: str, address: str, size: tuple[int, int]) -> dict[str, Any]:
    """Create a Service with session affinity, this many ports and endpoints, and return it."""
    listed = ports(size[0])
    made_slice = {**slice_of("sticky", *(f"10.7.0.{n + 1}" for n in range(size[1]))), "ports": listed}
    item = service("sticky", clusterIP=address, ports=listed, sessionAffinity="ClientIP")
    _, created = (
        made.api.store.create({**it, "metadata": {**it["metadata"], "namespace": namespace}})
        for it in (made_slice, item)
    )
    return created


def test_affinity_of_a_huge_service_delays_nobody(made: Victim) -> None:
    """It is served without, while three other namespaces keep as many lists as they may have."""
    for number in range(3):
        sticky(made, f"tenant{number}", f"10.96.7.{number + 1}", SHARE)
    huge = sticky(made, "attacker", "10.96.8.1", (400, 120) if made.backend == "nft" else (100, 100))
    eventually(lambda: "session affinity not kept" in made.log.read_text())
    kinds = itertools.cycle(("None", "ClientIP"))

    def act() -> None:
        nonlocal huge
        spec = huge["spec"] | {"sessionAffinity": next(kinds)}
        huge = made.api.store.replace({**huge, "spec": spec})

    made.assert_undisturbed(act)
    assert sum(1 for _ in Path("/proc/thread-self/net/xt_recent").iterdir()) == 3 * SHARE[0] * SHARE[1]
    assert "service=tenant" not in made.log.read_text()


# The sizes of a Service, in ports and endpoints: one above maxServicePairs, and one below.
OVERSIZED, LARGE = (5000, 20), (400, 20)


def huge(made: Victim, name: str, size: tuple[int, int]) -> Callable[[], None]:
    """Create a Service with many ports and endpoints; return a function that changes one endpoint."""
    listed = ports(size[0])
    made.api.store.create(service(name, clusterIP="10.96.7.7", ports=listed))
    addresses = [f"10.7.0.{number + 1}" for number in range(size[1])]
    made_slice = made.api.store.create({**slice_of(name, *addresses), "ports": listed})
    count = itertools.count()

    def act() -> None:
        nonlocal made_slice
        endpoint = {"addresses": [f"10.7.{next(count) % 250}.9"], "conditions": {"ready": True}}
        changed = [*made_slice["endpoints"][1:], endpoint]
        made_slice = made.api.store.replace(made_slice | {"endpoints": changed})

    return act


def test_an_oversized_service_is_quarantined_and_delays_nobody(made: Victim) -> None:
    act = huge(made, "huge", OVERSIZED)
    eventually(lambda: "service quarantined" in made.log.read_text())
    made.assert_undisturbed(act)


def test_a_large_service_delays_nobody(made: Victim) -> None:
    """It is served, but others do not wait for it; they take longer, because each commit costs more with its rules."""
    act = huge(made, "large", LARGE)
    made.assert_undisturbed(act, 2.0)


SERVED = 4
# Each set has more than 225 addresses, which a tree by digits of four bits would place on up to 31 levels.
NESTED = [
    nested_addresses(near, copies=copies)
    for near, copies in (("fd00:96::9:9", 8), ("2001:db8::", 16), ("10.96.9.9", 60), ("fd00:96::9:9", 16))
]


def hostile(number: int) -> dict[str, Any]:
    addresses = NESTED[number % len(NESTED)]
    assert len(addresses) > 225
    return service(
        f"hostile{number % SERVED}",
        **dual_stack(f"10.96.7.{number % SERVED + 1}", f"fd00:96::7:{number % SERVED + 1}"),
        externalIPs=addresses,
    )


def create_hostile(made: Victim) -> Callable[[], None]:
    """Create the other tenant's Services; return what changes one of them."""
    objects = []
    for number in range(SERVED):
        objects.append(made.api.store.create(hostile(number)))
        endpoints = slice_of(f"hostile{number}", f"10.244.7.{number + 1}")
        made.api.store.create(endpoints)
        name = {"name": f"hostile{number}-6"}
        endpoint = {"addresses": [f"fd00:244:7::{number + 1}"], "conditions": {"ready": True}}
        six = {"metadata": endpoints["metadata"] | name, "addressType": "IPv6", "endpoints": [endpoint]}
        made.api.store.create(endpoints | six)
    count = itertools.count()

    def change() -> None:
        """Remove or add some addresses, so that the tree gets other levels and back."""
        turn = next(count)
        number = turn % SERVED
        addresses = NESTED[number % len(NESTED)]
        kept = addresses[:: 2 + turn % 3] if turn // SERVED % 2 else addresses
        spec = objects[number]["spec"] | {"externalIPs": list(kept)}
        objects[number] = made.api.store.replace(objects[number] | {"spec": spec})

    return change


def test_nested_external_ips_delay_no_other_service(made: Victim) -> None:
    """In both families. Services are neither quarantined nor served without a tree."""
    before = len(made.log.read_text())
    made.assert_undisturbed(create_hostile(made))
    log = made.log.read_text()[before:]
    assert not [words for words in ("rejected", "sync failed", "quarantined") if words in log]


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_a_fresh_start_with_nested_external_ips_works(backend: str, tmp_path: Path) -> None:
    """The agent starts after the objects exist, on empty tables."""
    with victim(backend, tmp_path, before=create_hostile) as made:
        made.change()
        made.api.store.delete(SERVICES, "default", "hostile0")
        eventually(made.is_served)
        log = made.log.read_text()
        assert "rules in place" in log
        assert not [words for words in ("rejected", "sync failed", "quarantined") if words in log]


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_changes_of_quarantined_services_delay_nobody(backend: str, tmp_path: Path) -> None:
    environment = tool(tmp_path, f"iptables-{backend}-restore", f"sed '{REJECTED}' | $real \"$@\"")
    with victim(backend, tmp_path, environment=environment) as made:
        made.measure()
        slices = []
        for number in range(100):
            made.api.store.create(service(f"bad-{number}", clusterIP=f"10.96.20.{number}"))
            slices.append(made.api.store.create(slice_of(f"bad-{number}", "10.244.0.1")))
        eventually(lambda: metric(QUARANTINED) == len(slices))
        addresses = itertools.count()

        def act() -> None:
            """Change a third of the Services."""
            last = next(addresses) % 250
            for number in range(last % 3, len(slices), 3):
                endpoints = slice_of("", f"10.245.{number % 250}.{last}")["endpoints"]
                slices[number] = made.api.store.replace(slices[number] | {"endpoints": endpoints})

        made.assert_undisturbed(act)
        assert metric(QUARANTINED) == len(slices)


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
    return [it for it in made.api.store.list(EVENTS) if it["metadata"]["namespace"] == "attacker"]


def assert_not_disturbed(made: Victim) -> None:
    """The victim's changes arrive in time, pages are served, and no file could not be opened."""
    made.assert_undisturbed(lambda: None)
    for port, path in ((HEALTH, "/healthz"), (HEALTH, "/livez"), (METRICS, "/metrics")):
        assert answers(port, path, 200)
    assert serves(VICTIMS_CHECK)
    made.api.faults.drop_connections()
    made.change()  # over new connections of the watches
    log = made.log.read_text()
    assert "Too many open files" not in log
    assert "thread died" not in log


def test_many_health_check_ports_use_the_hard_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a soft limit below the number of ports, all are served."""
    monkeypatch.setattr(process, "PROGRAM", ("prlimit", "--nofile=1024:4096", *process.PROGRAM))
    with victim("nft", tmp_path) as made:
        made.api.store.create(local_service("victim", "web", VICTIMS_CHECK))
        made.measure()
        eventually(lambda: serves(VICTIMS_CHECK))
        create_many(made)
        eventually(lambda: serves(FIRST_CHECK + MANY - 1))
        assert len(served()) == MANY
        assert_not_disturbed(made)
        assert not events(made)


def test_health_check_ports_are_limited_by_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ports of others stay, newcomers get one, ten Services without one get an event, and one when others go."""
    monkeypatch.setattr(process, "PROGRAM", ("prlimit", "--nofile=1024:1024", *process.PROGRAM))
    with victim("nft", tmp_path, "--iptables-sync-period=5s") as made:
        made.api.store.create(local_service("victim", "web", VICTIMS_CHECK))
        made.measure()
        eventually(lambda: serves(VICTIMS_CHECK))
        create_many(made)
        eventually(lambda: "health check ports limited" in made.log.read_text())
        eventually(lambda: len(events(made)) >= 10)
        before = served()
        assert 650 < len(before) < 700
        assert_not_disturbed(made)
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
        eventually(lambda: len(served()) >= len(before) - 1)
        assert made.log.read_text().count("health check ports limited") == 1
