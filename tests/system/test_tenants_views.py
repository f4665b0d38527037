"""One tenant writes huge or broken objects: the agent stays small, and its pages and reports disclose nothing."""

import json
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import netns

from pykubeproxy.lab.apiserver import EVENTS, NODES, ApiServer
from pykubeproxy.pages.statusz import decode
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.http_client import fetch
from tests.fakes.process import (
    HEALTH,
    METRICS,
    answers,
    inside_a_namespace,
    megabytes,
    pykubeproxy,
    running,
    saved,
)
from tests.fakes.victim import Victim, victim
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

LENGTH = 1_400_000
SERVER = "192.168.50.1"


def commas(made: Victim) -> None:
    """Create four Services whose names have more commas than a list may have values."""
    for number in range(4):
        made.api.store.create(service(f"c{number}", type="ExternalName", externalName="," * LENGTH))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """An agent that has started beside Services of commas."""
    with victim("nft", tmp_path_factory.mktemp("victim"), before=commas, server_address=SERVER) as made:
        yield made


def new_lines(made: Victim, before: int) -> list[str]:
    """Return the lines of the log after so many characters."""
    return made.log.read_text()[before:].splitlines()


def test_long_texts_stop_no_agent_and_take_no_memory(made: Victim) -> None:
    """The agent serves others; zones with an emoji take no memory."""
    before = megabytes(made.pid)
    for number in range(40):
        hostile = slice_of(f"z{number}", f"10.7.0.{number + 1}")
        hostile["endpoints"][0]["zone"] = f"\N{CLOWN FACE}{number}{'z' * LENGTH}"
        made.api.store.create(hostile)
    made.change()
    assert megabytes(made.pid) - before < 60
    assert "watch failed" not in made.log.read_text()


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


def test_a_toggled_address_hides_no_event_of_others(made: Victim) -> None:
    """Three events are sent of the hostile Service, and no request asks for its UID."""
    uid = made.api.store.create(claiming(made, "hostile", True))["metadata"]["uid"]
    before = len(made.api.requests.entries("list", "services"))
    repeat(4, lambda number: made.api.store.replace(claiming(made, "hostile", number % 2 == 0)))
    made.api.store.create(claiming(made, "other", True))
    eventually(lambda: noted(made, "other") == ["AddressSkipped"])
    assert 1 <= len(noted(made, "hostile")) <= 3
    events = [it for it in made.api.store.list(EVENTS) if it["metadata"]["namespace"] == "hostile"]
    assert {it["regarding"]["uid"] for it in events} == {uid}
    assert len(made.api.requests.entries("list", "services")) == before
    eventually(lambda: made.log.read_text().count("external address skipped") >= 2)
    assert made.log.read_text().count("external address skipped") <= 4


def test_hostile_objects_fill_no_log(made: Victim) -> None:
    """Each update has other invalid values; the lines about one Service are limited."""

    def act(number: int) -> None:
        it = service("hostile", clusterIP="10.96.6.8", externalIPs=[f"127.0.0.{number % 250 + 1}"])
        made.api.store.replace(it, verbatim=True)

    before = len(made.log.read_text())
    made.api.store.create(service("hostile", clusterIP="10.96.6.8"))
    assert repeat(4, act) > 20
    made.change()
    lines = new_lines(made, before)
    assert 1 <= sum("invalid values skipped" in line for line in lines) <= 3


def test_a_node_that_comes_and_goes_fills_no_log(made: Victim) -> None:
    """Hundreds of times in some seconds."""
    before = len(made.log.read_text())
    for _ in range(300):
        made.api.store.delete(NODES, "", "node1")
        made.api.store.create(node("node1", "192.168.99.10"))
    made.change()
    lines = new_lines(made, before)
    assert sum("node deleted, serving with its last state" in line for line in lines) <= 3
    assert len(lines) <= 5, lines


NODE, POD, VIP = "192.168.99.10", "192.168.99.20", "10.96.0.99"
NODE6 = "fd00:99::10"
HTML, JSON = "text/html", "application/json"


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@pytest.fixture
def pod() -> Iterator[str]:
    """Move the test to the network namespace of a node, and return that of a pod on it."""
    with inside_a_namespace():
        name = f"pod-{uuid.uuid4().hex[:10]}"
        netns.create(name)
        try:
            run(f"ip link add veth0 type veth peer name eth0 netns {name}")
            run(f"ip address add {NODE}/24 dev veth0")
            run(f"ip address add {NODE6}/64 dev veth0 nodad")
            run("ip link set veth0 up")
            run(f"ip -n {name} address add {POD}/24 dev eth0")
            run(f"ip -n {name} address add fd00:99::20/64 dev eth0 nodad")
            run(f"ip -n {name} link set eth0 up")
            run(f"ip -n {name} link set lo up")
            run(f"ip -n {name} route add default via {NODE}")
            run(f"ip route add default via {POD}")  # packets to Services must have a route
            yield name
        finally:
            netns.remove(name)


@contextmanager
def agent(log: Path, *flags: str) -> Iterator[ApiServer]:
    """Run an agent whose tenant has a Service with the metrics address as its endpoint."""
    with server() as api:
        api.store.create(node("node1", NODE))
        ports = [{"port": METRICS, "nodePort": 30000}]
        api.store.create(service("victim", clusterIP="10.96.0.10"))
        api.store.create(slice_of("victim", "10.244.0.5"))
        api.store.create(service("tenant", type="NodePort", clusterIP=VIP, ports=ports))
        api.store.create(slice_of("tenant", NODE) | {"ports": [{"port": METRICS}]})
        given = ("--master", api.url, "--hostname-override=node1", "--masquerade-all", *flags)
        with running(log, *given):
            eventually(lambda: answers(HEALTH, "/readyz", 200))
            eventually(lambda: any(f"{NODE}:{METRICS}" in rule for rule in saved()))
            yield api


def requested(path: str, accept: str, *where: str, arguments: Sequence[str] = ()) -> str:
    """Return status and body of a response to curl, run behind the command `where`."""
    head = ("-sS", "-m", "10", "-w", "\n%{http_code}", "-H", f"Accept: {accept}")
    done = subprocess.run(
        [*where, "curl", *head, *arguments, path], capture_output=True, text=True, check=True
    )
    body, _, status = done.stdout.rpartition("\n")
    return f"{status} {body.strip()}"


def is_kube_proxys(url: str, *where: str, arguments: Sequence[str] = ()) -> bool:
    """Return whether the pages at an address are kube-proxy's, which name no Service."""
    text, html, json = [
        requested(f"{url}/statusz", accept, *where, arguments=arguments) for accept in ("*/*", HTML, JSON)
    ]
    assert requested(f"{url}/metrics", "*/*", *where, arguments=arguments).startswith("200 ")
    return (
        all(page.startswith("200 kube-proxy statusz") for page in (text, html))
        and json.startswith("406 406 not acceptable")
        and requested(f"{url}/servicez", JSON, *where, arguments=arguments) == "404 404 page not found"
    )


def test_a_public_metrics_address_shows_services_only_to_the_node(pod: str, tmp_path: Path) -> None:
    """Over both families, whatever a client claims to be, and through a Service that leads to the address."""
    inside = ("ip", "netns", "exec", pod)
    claims = ["-H", "X-Forwarded-For: 127.0.0.1", "-H", "Forwarded: for=127.0.0.1", "-H", "Host: 127.0.0.1"]
    with agent(tmp_path / "log", "--metrics-bind-address", f"0.0.0.0:{METRICS}"):
        for url in (f"http://{NODE}:{METRICS}", f"http://[{NODE6}]:{METRICS}"):
            assert is_kube_proxys(url, *inside, arguments=claims)
        for address in (f"{VIP}:{METRICS}", f"{NODE}:30000"):
            assert is_kube_proxys(f"http://{address}", *inside, arguments=claims)
        # From the node itself, the peer is an address of the node, as after a masquerade.
        for address in (f"{VIP}:{METRICS}", "127.0.0.1:30000"):
            assert is_kube_proxys(f"http://{address}", arguments=["-H", "Host: 127.0.0.1"])
        for host in ("127.0.0.1", "::1"):
            services = decode(fetch(METRICS, "/statusz", host=host, accept=JSON).body.encode()).services
            assert {port.name for port in services} == {"victim", "tenant"}
            assert "10.244.0.5" in fetch(METRICS, "/servicez?service=default/victim", host=host).body
        rebound = requested(
            f"http://127.0.0.1:{METRICS}/servicez", JSON, arguments=["-H", "Host: evil.example"]
        )
        assert rebound.startswith("404 ")
        assert pykubeproxy("status").returncode == 0
        assert "10.244.0.5" in pykubeproxy("explain", "default/victim").stdout
        remote = pykubeproxy("status", "--url", f"http://{NODE}:{METRICS}")
        assert (remote.returncode, "over loopback only" in remote.stderr) == (2, True)


def test_commands_work_beside_a_metrics_address_of_the_node(pod: str, tmp_path: Path) -> None:
    """The agent listens on 127.0.0.1 too."""
    with agent(tmp_path / "log", "--metrics-bind-address", f"{NODE}:{METRICS}"):
        assert is_kube_proxys(f"http://{NODE}:{METRICS}")
        assert is_kube_proxys(f"http://{NODE}:{METRICS}", "ip", "netns", "exec", pod)
        assert json.loads(pykubeproxy("status", "-o", "json").stdout)["nodes"][0]["agent"]["matching"] == 2
        assert "10.244.0.5" in pykubeproxy("explain", "default/victim").stdout


def test_a_taken_loopback_address_does_not_stop_the_agent(pod: str, tmp_path: Path) -> None:
    """As for kube-proxy, the metrics address itself is all that bindAddressHardFail is about."""
    flags = ("--metrics-bind-address", f"{NODE}:{METRICS}", "--bind-address-hard-fail")
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", METRICS)), agent(log, *flags):
        assert is_kube_proxys(f"http://{NODE}:{METRICS}")
        assert "bind failed, retrying server=metrics-loopback address=127.0.0.1:10249" in log.read_text()
