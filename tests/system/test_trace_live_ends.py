"""Nothing of `trace --live` stays when signals end it, at any of its steps."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pykubeproxy.lab.cluster import Lab
from tests.fakes.kubectl import kubectl, needs_kubectl
from tests.fakes.process import COMMAND
from tests.fakes.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.root, needs_kubectl]

TABLE = "pykubeproxy-trace"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab in which node1 loses replies, so that probes last and both nodes have entries."""
    with Lab(f"te{os.getpid()}", backend="nft") as made, made.outside.namespace.entered():
        made.deploy("client", 1, nodes=["node1"])
        made.deploy("web", 1, nodes=["node2"])
        made.service("web")
        made.until(lambda: kubectl(made, "get", "pod", "web-1").returncode == 0, "pods")
        hook = "type filter hook ingress device eth0 priority 0"
        on_node(made, "node1", "nft", f"table netdev lost {{ chain c {{ {hook}; tcp sport 8080 drop; }}; }}")
        yield made


def on_node(lab: Lab, node: str, *command: str) -> str:
    with lab.nodes[node].namespace.entered():
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def entries(lab: Lab, node: str) -> list[str]:
    lines = on_node(lab, node, "conntrack", "-L", "-p", "tcp").splitlines()
    return [line for line in lines if f"src={lab.pods['client-1'].addresses[0]}" in line]


def left(lab: Lab, form: str) -> list[str]:
    """Return what is left: entries, tables and connections. A command on node1 does not reach node2."""
    nodes = ["node1"] if form == "node" else lab.nodes
    tables = on_node(lab, "node1", "nft", "list", "tables").splitlines()
    sockets = lab.pods["client-1"].namespace
    with sockets.entered():
        open_sockets = Path("/proc/net/tcp").read_text().count(" 02 ")
    return [
        *(line for node in nodes for line in entries(lab, node)),
        *(line for line in tables if TABLE in line),
        *(["SYN_SENT"] * open_sockets),
    ]


def start(lab: Lab, form: str) -> subprocess.Popen[str]:
    client, endpoint = (lab.pods[name].addresses[0] for name in ("client-1", "web-1"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options = ("trace", "--live", client, f"{endpoint}:8080", "--rules-hit")
    if form == "node":
        with lab.nodes["node1"].namespace.entered():
            return subprocess.Popen((*COMMAND, *options), **pipes)  # type: ignore[call-overload]
    files = {"HOME": str(lab.directory.path), "KUBECONFIG": str(lab.directory.kubeconfig)}
    command = ("kubectl", "pykubeproxy", *options)
    return subprocess.Popen(command, env={**os.environ, **files}, **pipes)  # type: ignore[call-overload]


@pytest.fixture(autouse=True)
def no_entries(lab: Lab) -> None:
    on_node(lab, "node2", "conntrack", "-F")


def has_read(_: Lab, process: subprocess.Popen[str]) -> None:
    """It notes which rules it cannot evaluate before it sends."""
    assert process.stderr
    assert "table netdev lost" in process.stderr.readline()


def sends(lab: Lab, _: subprocess.Popen[str]) -> None:
    eventually(lambda: entries(lab, "node1"))


def reads_again(lab: Lab, process: subprocess.Popen[str]) -> None:
    sends(lab, process)
    eventually(lambda: not entries(lab, "node1"))


@pytest.mark.parametrize("form", ["node", "kubectl"])
@pytest.mark.parametrize("step", [has_read, sends, reads_again])
@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]], ids=["int", "term"])
def test_signals_end_a_live_trace_when_nothing_is_left(
    lab: Lab,
    form: str,
    step: Callable[[Lab, subprocess.Popen[str]], None],
    signals: Sequence[signal.Signals],
) -> None:
    process = start(lab, form)
    step(lab, process)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.1)
    _, errors = process.communicate(timeout=PATIENCE)
    assert left(lab, form) == []
    # Before and after the steps that create something, any signal ends it at once; or it has ended before, with 3.
    ends = {128 + number for number in signals} | {-number for number in signals}
    if step is reads_again:
        ends.add(3)
    assert process.returncode in ((128 + signals[0],) if step is sends else ends), errors
    notes = ("table netdev lost", "waiting up to")
    lines = [line for line in errors.splitlines() if line and not any(note in line for note in notes)]
    assert [line[:14] for line in lines] in (
        [["Ending as soon"]] if step is sends else [["Ending as soon"], []]
    )


@pytest.mark.parametrize("form", ["node", "kubectl"])
def test_nothing_stays_on_the_node_of_the_client_after_kill_9(lab: Lab, form: str) -> None:
    """Another node forgets entries without replies within minutes."""
    process = start(lab, form)
    sends(lab, process)
    process.kill()
    process.communicate()
    on_node(lab, "node2", "conntrack", "-F")
    eventually(lambda: not left(lab, form))
