"""A lab starts, is used by several commands, and leaves nothing behind; its network is as documented."""

import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pykubeproxy.lab import daemon, machine
from pykubeproxy.lab.api import PODS, SLICES, in_namespace
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.machine import LabExists, RunDirectory
from pykubeproxy.lab.network import OUTSIDE, lab_namespaces
from tests.fakes.kubectl import needs_kubectl
from tests.fakes.process import COMMAND, MAIN, pykubeproxy
from tests.fakes.waiting import PATIENCE, eventually

pytestmark = pytest.mark.root

_numbers = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    """A unique lab name; a lab that the test leaves is removed."""
    name = f"tl{os.getpid()}x{next(_numbers)}"
    yield name
    daemon.down(name)


def processes(name: str) -> list[int]:
    """Pidfds of the processes in a lab; pids may be reused."""
    return [os.pidfd_open(pid) for pid in machine.processes_in(lab_namespaces(name))]


def is_removed(name: str, inside: list[int]) -> bool:
    """Whether namespaces, directory and processes are gone."""
    ended = select.select(inside, [], [], 0)[0]
    return not lab_namespaces(name) and not RunDirectory(name).path.exists() and len(ended) == len(inside)


def links() -> str:
    """The links, addresses and routes of the machine's own namespace."""
    own = ["ip -o link", "ip -o addr", "ip route", "ip -6 route", "cat /proc/sys/net/ipv4/ip_forward"]
    return subprocess.run(["sh", "-c", "; ".join(own)], capture_output=True, text=True, check=True).stdout


def lab_command(*arguments: str) -> str:
    done = pykubeproxy("lab", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def driver(name: str) -> Iterator[subprocess.Popen[str]]:
    """A driver in the background, as `lab up` starts it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pykubeproxy.lab.daemon", name, "auto", "1"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def first_line(driver: subprocess.Popen[str]) -> str:
    assert driver.stdout is not None
    return driver.stdout.readline()


def leave_early(directory: RunDirectory) -> None:
    """Connect to the driver and end before and after a request, as a command does on Ctrl-C; it must not end."""
    for sent in (b"", b"{", b'["scale", "x"]\n', b'["scale", "2"]\n'):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(directory.requests))
            connection.sendall(sent)


def test_up_status_down(name: str) -> None:
    """`lab up` starts a lab, `status` shows it, `down` removes it. The documentation has examples of `exec`."""
    lab_command("up", "--name", name, "--pods", "2")
    inside = processes(name)
    document = json.loads(lab_command("status", "--name", name, "-o", "json"))
    hosts = {host["name"]: host for host in document["hosts"]}
    assert (document["apiVersion"], document["lab"]) == ("pykubeproxy/v1", name)
    web = hosts["web-2"]
    assert (web["kind"], web["node"], web["state"]) == ("pod", "node2", "ready")
    assert hosts["node1"]["agent"] and hosts["outside"]["addresses"][0] == "203.0.113.10"
    assert document["services"][0]["ports"][0]["nodePort"]
    leave_early(RunDirectory(name))
    for words in (("stop", "node1"), ("scale", "1")):
        lab_command(*words, "--name", name)
    document = json.loads(lab_command("status", "--name", name, "-o", "json"))
    assert [host["agent"] for host in document["hosts"] if host["name"] == "node1"] == [None]
    assert "web-2" not in {host["name"] for host in document["hosts"]}
    # On a host, commands for labs mean its own; a new pod goes to the node with fewer.
    lab_command("exec", "--name", name, "node2", "--", *COMMAND, "lab", "scale", "2")
    document = json.loads(lab_command("status", "--name", name, "-o", "json"))
    assert [host["node"] for host in document["hosts"] if host["name"] == "web-3"] == ["node2"]
    lab_command("start", "node1", "--name", name)
    assert "stopped" not in lab_command("status", "--name", name)
    assert name in lab_command("list", "-o", "name").split()
    assert "Removed" in lab_command("down", "--name", name)
    assert is_removed(name, inside)
    assert "There is no lab" in lab_command("down", "--name", name)


@needs_kubectl
def test_kube_proxy_runs_in_place_of_the_agents(name: str, tmp_path: Path) -> None:
    """The stand-in is an agent with kube-proxy's configuration, and finds iptables by the name without a backend."""
    binary = tmp_path / "kube-proxy"
    binary.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && echo Kubernetes v1.36.2 && exit\n'
        "iptables --version && exec pykubeproxy run --iptables-backend legacy $@\n"
    )
    binary.chmod(0o755)
    options = ("--kube-proxy", str(binary), "--iptables-backend", "legacy", "--pods", "1")
    assert lab_command("up", "--name", name, *options).count("kube-proxy running") == 2
    assert "(legacy)" in (RunDirectory(name).logs / "node1.log").read_text()
    lab_command("stop", "node1", "--name", name)
    assert lab_command("status", "--name", name).count("kube-proxy stopped") == 1
    lab_command("mend", "--name", name)
    assert lab_command("status", "--name", name).count("kube-proxy running") == 2
    (line, _) = lab_command(
        *(
            "exec",
            "--name",
            name,
            "client",
            "--",
            "kubectl",
            "get",
            "pods",
            "-n",
            "kube-system",
            "--no-headers",
        ),
        *("-o", "custom-columns=:.metadata.name,:.metadata.labels,:.spec.containers[0].image"),
    ).splitlines()
    assert line.split() == [
        "kube-proxy-node1",
        "map[k8s-app:kube-proxy]",
        "registry.k8s.io/kube-proxy:v1.36.2",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_driver_death_removes_the_lab(
    name: str, driver: subprocess.Popen[str], number: signal.Signals
) -> None:
    """Any signal that ends the driver removes processes, namespaces and directory; the name is free at once."""
    assert first_line(driver) == "ready\n"
    inside = processes(name)
    assert len(inside) >= 4, "an API server, two agents and a pod are running"
    driver.send_signal(number)
    driver.wait(20)
    if number is signal.SIGKILL:
        with Lab(name, agents=False) as lab:
            (pod,) = lab.deploy("web", 1)
            for _ in range(20):
                assert lab.outside.prober.tcp(pod.target()).pods == {"web-1": 1}
    eventually(lambda: is_removed(name, inside))


@pytest.mark.parametrize(
    ("number", "made"), [(signal.SIGKILL, 1), (signal.SIGTERM, 3), (signal.SIGINT, 5), (signal.SIGKILL, 5)]
)
def test_driver_death_while_building_removes_the_lab(
    name: str, driver: subprocess.Popen[str], number: signal.Signals, made: int
) -> None:
    """A signal while the lab is built removes it too."""
    eventually(lambda: len(lab_namespaces(name)) >= made)
    driver.send_signal(number)
    driver.wait(20)
    eventually(lambda: is_removed(name, []))


def test_labs_run_side_by_side(name: str) -> None:
    """Two labs use the same addresses without conflict; one of the same name is rejected.

    The machine's own network does not change.
    """
    before = links()
    with Lab(f"{name}a", agents=False) as first, Lab(f"{name}b", agents=False) as second:
        with pytest.raises(LabExists), Lab(f"{name}a"):
            pass
        (one,) = first.deploy("one", 1)
        (two,) = second.deploy("two", 1)
        assert one.target() == two.target()
        assert first.outside.prober.tcp(one.target(), 5).pods == {"one-1": 5}
        assert second.outside.prober.tcp(two.target(), 5).pods == {"two-1": 5}
        assert links() == before
    assert links() == before


def test_down_removes_a_lab_without_driver_and_janitor(name: str, driver: subprocess.Popen[str]) -> None:
    """`lab down` cleans up after both the driver and the janitor were killed."""
    assert first_line(driver) == "ready\n"
    inside = processes(name)
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    janitors = [
        pid for pid in children if b"pykubeproxy.lab.machine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(janitors) == 1
    os.kill(int(janitors[0]), signal.SIGKILL)
    driver.kill()
    driver.wait()
    assert lab_namespaces(name), "no process is left to clean up"
    assert "Removed" in lab_command("down", "--name", name)
    assert is_removed(name, inside)


def test_demo_reports_a_failed_scenario(name: str) -> None:
    """`lab demo` names the failed scenario and its reason and exits with 1: here the agents end at once."""
    broken = "from pykubeproxy.lab import agents; agents.COMMAND = ['sh', '-c', 'echo cannot go on; exit 3']"
    command = [sys.executable, "-c", f"{broken}; {MAIN}", "lab", "demo", "scale", "--name", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 1
    assert "exit code 3: cannot go on" in " ".join(done.stdout.split())
    assert re.search(r"1 of 1 scenarios failed in \d+ s: scale", done.stdout)
    assert is_removed(name, [])


def test_demo_prints_json(name: str) -> None:
    """With -o json `lab demo` prints one document only, exits with 0 and cleans up."""
    document = json.loads(lab_command("demo", "scale", "--name", name, "-o", "json"))
    assert (document["ok"], document["lab"], document["backend"]) == (True, name, "auto")
    (scale,) = document["scenarios"]
    assert scale["name"] == "scale"
    assert any("web-1 200" in entry["text"] for entry in scale["log"])
    assert is_removed(name, [])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab without agents."""
    with Lab(f"tn{os.getpid()}", agents=False) as lab:
        yield lab


@pytest.mark.parametrize("family", [4, 6])
def test_hosts_reach_every_pod(lab: Lab, family: int) -> None:
    """Pods, nodes and the client reach each pod over TCP and UDP with their own addresses."""
    lab.reset()
    pods = lab.deploy("web", 3)
    sources = [(node.prober, node.addresses[family == 6]) for node in lab.nodes.values()]
    sources.append((lab.outside.prober, OUTSIDE[family == 6]))
    sources += [(pod.prober, pod.addresses[family == 6]) for pod in pods]
    for (prober, address), pod in itertools.product(sources, pods):
        if prober._namespace is pod.namespace:
            continue  # a pod that calls itself may use another source address
        for result in (prober.tcp(pod.target(family)), prober.udp(pod.target(family))):
            assert result.pods == {pod.name: 1}
            assert set(result.clients) == {address}


def test_slices_follow_pod_status(lab: Lab) -> None:
    """The EndpointSlices have each change of a pod's status when the call returns."""
    lab.reset()
    (pod,) = lab.deploy("web", 1, gates=["outside"])
    lab.service("web")

    def conditions() -> list[tuple[bool, bool, bool]]:
        return [
            (status["ready"], status["serving"], status["terminating"])
            for slice_ in lab.api.items(SLICES)
            for status in (endpoint["conditions"] for endpoint in slice_["endpoints"])
        ]

    assert conditions() == [(False, False, False)] * 2, "the gate is closed; one slice for each family"
    pod.open_gate("outside")
    assert conditions() == [(True, True, False)] * 2
    pod.set_answering(False)
    assert conditions() == [(False, False, False)] * 2
    pod.set_answering(True)
    pod.mark_terminating()
    assert conditions() == [(False, True, True)] * 2
    pod.kill()
    lab.remove_pod(pod)
    assert conditions() == []


def test_pod_objects_follow_pod_status(lab: Lab) -> None:
    """The Pod objects have each change of a pod's status when the call returns, with the name in EndpointSlices."""
    lab.reset()
    (pod,) = lab.deploy("web", 1)
    lab.service("web")
    path = in_namespace(PODS, "default")
    (endpoint,) = lab.api.items(SLICES)[0]["endpoints"]

    def ready() -> str:
        found = lab.api.call("GET", f"{path}/{endpoint['targetRef']['name']}")
        assert found["spec"]["nodeName"] == endpoint["nodeName"]
        assert [pod_ip["ip"] for pod_ip in found["status"]["podIPs"]] == list(pod.addresses)
        return str(
            {condition["type"]: condition["status"] for condition in found["status"]["conditions"]}["Ready"]
        )

    assert ready() == "True"
    pod.set_answering(False)
    assert ready() == "False"
    pod.mark_terminating()
    assert "deletionTimestamp" in lab.api.items(path)[0]["metadata"]
    pod.kill()
    lab.remove_pod(pod)
    assert lab.api.items(path) == []


def test_stopped_pod_refuses_connections(lab: Lab) -> None:
    """Connections to a stopped pod are refused at once."""
    lab.reset()
    (pod,) = lab.deploy("web", 1)
    lab.stop_pod(pod)
    for family in (4, 6):
        result = lab.nodes["node2"].prober.tcp(pod.target(family), 20)
        assert result.errors == {"refused": 20}
        assert result.slowest < 0.5


def test_pod_serves_while_it_lingers(lab: Lab) -> None:
    """A pod with a linger time serves after SIGTERM, then ends."""
    lab.reset()
    (pod,) = lab.deploy("web", 1, linger=0.5)
    stream = lab.outside.prober.stream(pod.target(), pause=0.01)
    pod.terminate()
    assert lab.outside.prober.tcp(pod.target(), 20).pods == {"web-1": 20}
    pod.wait_ended()
    assert stream.stop().pods["web-1"]
    assert lab.outside.prober.tcp(pod.target()).errors == {"refused": 1}


def test_cluster_ip_fails_without_rules(lab: Lab) -> None:
    """Without rules a cluster IP does not answer, so answers in scenarios prove the agent's rules."""
    lab.reset()
    lab.deploy("web", 1)
    vip = lab.service("web").vip()
    assert not lab.nodes["node1"].prober.tcp(vip, 3, timeout=0.2).pods
