"""One tenant writes huge or broken objects: the agent stays small, and its pages and reports disclose nothing."""

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from pyroute2 import netns

from pykubeproxy.lab.apiserver import EVENTS, NODES, ApiServer
from pykubeproxy.pages.statusz import decode
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, running, saved
from tests.fakes.victim import Victim, victim

pytestmark = pytest.mark.root

LENGTH = 1_400_000


def megabytes(pid: int) -> float:
    """Return the resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


def commas(made: Victim) -> None:
    """Create four Services whose names have more commas than a list may have values."""
    for number in range(4):
        made.api.store.create(service(f"c{number}", type="ExternalName", externalName="," * LENGTH))


def test_long_texts_stop_no_agent_and_take_no_memory(tmp_path: Path) -> None:
    """An agent that starts beside Services of commas serves others; zones with an emoji take no memory."""
    with victim("nft", tmp_path, before=commas) as made:
        before = megabytes(made.pid)
        for number in range(40):
            hostile = slice_of(f"z{number}", f"10.7.0.{number + 1}")
            hostile["endpoints"][0]["zone"] = f"\N{CLOWN FACE}{number}{'z' * LENGTH}"
            made.api.store.create(hostile)
        made.change()
        assert megabytes(made.pid) - before < 60
        assert "watch failed" not in made.log.read_text()


def test_updates_during_a_long_sync_take_no_memory(tmp_path: Path) -> None:
    """Of one slice of 1000 endpoints, 300 times, while iptables takes long; then the victim's change is served."""
    slow, program = tmp_path / "slow", "iptables-nft-restore"
    tool = tmp_path / "tools" / program
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nwhile [ -e {slow} ]; do sleep 0.1; done\nexec {which(program)} "$@"\n')
    tool.chmod(0o755)
    environment = {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    with victim("nft", tmp_path, environment=environment) as made:
        endpoints = slice_of("large", *(f"10.7.{n // 250}.{n % 250 + 1}" for n in range(1000)))["endpoints"]
        large = made.api.store.create(slice_of("large"))
        made.change()
        slow.touch()
        made.api.store.create(service("trigger", clusterIP="10.96.9.7"))
        time.sleep(2)  # its sync begins
        before = megabytes(made.pid)
        for number in range(300):
            for position, endpoint in enumerate(endpoints):
                endpoint["targetRef"] = {"name": f"{number}-{position}-{'p' * 200}"}
            large = made.api.store.replace(large | {"endpoints": endpoints})
        time.sleep(1)  # the last ones arrive
        assert megabytes(made.pid) - before < 60
        slow.unlink()
        made.change()


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
        assert json.loads(command("status", "-o", "json").stdout)["nodes"][0]["agent"]["matching"] == 2
        assert "10.244.0.5" in command("explain", "default/victim").stdout


def test_a_taken_loopback_address_does_not_stop_the_agent(pod: str, tmp_path: Path) -> None:
    """As for kube-proxy, the metrics address itself is all that bindAddressHardFail is about."""
    flags = ("--metrics-bind-address", f"{NODE}:{METRICS}", "--bind-address-hard-fail")
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", METRICS)), agent(log, *flags):
        assert is_kube_proxys(f"http://{NODE}:{METRICS}")
        assert "bind failed, retrying server=metrics-loopback address=127.0.0.1:10249" in log.read_text()


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


SERVICES = 300
GAUGE = 'pykubeproxy_services_quarantined{{ip_family="IPv4"}} {}.0'


def rejecting_environment(folder: Path, backend: str) -> dict[str, str]:
    """Return an environment in which the rules of services named bad-… use a counter that does not exist."""
    name = f"iptables-{backend}-restore"
    real = shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    sed_script = r"/default\/bad-[0-9]* cluster IP/s/ -m tcp / -m tcp -m nfacct --nfacct-name nobody /"
    (folder / "tools").mkdir()
    (folder / "tools" / name).write_text(f"#!/bin/sh\nsed '{sed_script}' | {real} \"$@\"\n")
    (folder / "tools" / name).chmod(0o755)
    return {"PATH": f"{folder}/tools:{os.environ['PATH']}"}


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_changes_of_quarantined_services_delay_nobody(backend: str, tmp_path: Path) -> None:
    environment = rejecting_environment(tmp_path, backend)
    with victim(backend, tmp_path, environment=environment) as made:
        allowed = made.allowed()
        slices = []
        for number in range(SERVICES):
            name = f"bad-{number}"
            made.api.store.create(service(name, clusterIP=f"10.96.{number // 200 + 20}.{number % 200}"))
            slices.append(made.api.store.create(slice_of(name, f"10.244.{number // 200}.{number % 200}")))
        gauge = GAUGE.format(SERVICES)
        eventually(lambda: gauge in fetch(METRICS, "/metrics").body, 120)
        addresses = itertools.count()

        def act() -> None:
            """Change a third of the Services."""
            last = next(addresses) % 250
            for number in range(last % 3, SERVICES, 3):
                endpoints = slice_of("", f"10.245.{number % 250}.{last}")["endpoints"]
                slices[number] = made.api.store.replace(slices[number] | {"endpoints": endpoints})

        assert made.median_while(act) <= allowed
        assert gauge in fetch(METRICS, "/metrics").body
