"""What clients on other hosts, and tenants through their Services, see of other tenants on the metrics address."""

import json
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyroute2 import netns

from pykubeproxy.agent.observe.status import decode
from pykubeproxy.lab.apiserver import ApiServer
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, running, saved

pytestmark = pytest.mark.root

NODE, POD, VIP = "192.168.99.10", "192.168.99.20", "10.96.0.99"
NODE6 = "fd00:99::10"
HTML, JSON = "text/html", "application/json"
PROGRAM = (sys.executable, "-c", "from pykubeproxy.cli import main; main()")


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
    command = [
        *where,
        "curl",
        "-sS",
        "-m",
        "10",
        "-w",
        "\n%{http_code}",
        "-H",
        f"Accept: {accept}",
        *arguments,
        path,
    ]
    body, _, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rpartition(
        "\n"
    )
    return f"{status} {body.strip()}"


def is_kube_proxys(url: str, *where: str, arguments: Sequence[str] = ()) -> bool:
    """Return whether the pages at an address are kube-proxy's, which name no Service."""
    text, *others = [
        requested(f"{url}/statusz", accept, *where, arguments=arguments) for accept in ("*/*", HTML, JSON)
    ]
    assert requested(f"{url}/metrics", "*/*", *where, arguments=arguments).startswith("200 ")
    return (
        text.startswith("200 kube-proxy statusz")
        and all(page.startswith('406 {"kind":"Status",') for page in others)
        and requested(f"{url}/servicez", JSON, *where, arguments=arguments) == "404 404 page not found"
    )


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=30)


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
        for address in (f"{VIP}:{METRICS}", f"{NODE}:30000", "127.0.0.1:30000", f"{NODE}:{METRICS}"):
            assert is_kube_proxys(f"http://{address}", arguments=["-H", "Host: 127.0.0.1"])
        for host in ("127.0.0.1", "::1"):
            answer = fetch(METRICS, "/statusz", host=host, accept=JSON)
            assert {port.name for port in decode(answer.body.encode()).services} == {"victim", "tenant"}
            assert "10.244.0.5" in fetch(METRICS, "/servicez?service=default/victim", host=host).body
        rebound = requested(
            f"http://127.0.0.1:{METRICS}/servicez", JSON, arguments=["-H", "Host: evil.example"]
        )
        assert rebound.startswith("404 ")
        assert command("status").returncode == 0
        assert "10.244.0.5" in command("explain", "default/victim").stdout
        remote = command("status", "--url", f"http://{NODE}:{METRICS}")
        assert (remote.returncode, "over loopback only" in remote.stderr) == (2, True)


def test_commands_work_beside_a_metrics_address_of_the_node(pod: str, tmp_path: Path) -> None:
    """The agent listens on 127.0.0.1 too."""
    with agent(tmp_path / "log", "--metrics-bind-address", f"{NODE}:{METRICS}"):
        assert is_kube_proxys(f"http://{NODE}:{METRICS}")
        assert is_kube_proxys(f"http://{NODE}:{METRICS}", "ip", "netns", "exec", pod)
        assert json.loads(command("status", "-o", "json").stdout)["matching"] == 2
        assert "10.244.0.5" in command("explain", "default/victim").stdout


def test_a_taken_loopback_address_does_not_stop_the_agent(pod: str, tmp_path: Path) -> None:
    """As for kube-proxy, the metrics address itself is all that bindAddressHardFail is about."""
    flags = ("--metrics-bind-address", f"{NODE}:{METRICS}", "--bind-address-hard-fail")
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", METRICS)), agent(log, *flags):
        assert is_kube_proxys(f"http://{NODE}:{METRICS}")
        assert "bind failed, retrying server=metrics-loopback address=127.0.0.1:10249" in log.read_text()
