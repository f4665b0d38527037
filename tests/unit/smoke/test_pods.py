"""The programs of the smoke test's pods, run locally."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.fakes.waiting import PATIENCE, eventually
from vagrant.smoke import answers
from vagrant.smoke.objects import NAMESPACE, ingress, objects

POD = Path(answers.__file__).parent / "pod"


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a web server that lingers for the whole test."""
    environment = {**os.environ, "PORT": str(port), "LINGER_SECONDS": "60"}
    process = subprocess.Popen([sys.executable, POD / "server.py"], env=environment)
    try:
        eventually(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield process
    finally:
        process.kill()
        process.wait()


def probe(port: int, count: int, text: str | None = None) -> answers.Seen:
    command = [sys.executable, str(POD / "probe.py"), "127.0.0.1", str(port), str(count)]
    return answers.parse(
        subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    )


def test_server_returns_pod_and_client(server: subprocess.Popen[bytes], port: int) -> None:
    """The response has the pod's name, the client's address and X-Forwarded-For."""
    for host in ("127.0.0.1", "::1"):
        connection = HTTPConnection(host, port, timeout=PATIENCE)
        connection.request("GET", "/any", headers={"X-Forwarded-For": "192.0.2.1"})
        response = json.loads(connection.getresponse().read())
        connection.close()
        assert response == {"pod": socket.gethostname(), "client": host, "forwarded_for": "192.0.2.1"}


def test_server_responds_after_sigterm(server: subprocess.Popen[bytes], port: int) -> None:
    """Proxies learn of the termination later than the pod."""
    assert answers.unbroken(probe(port, 3), 3) == ""
    server.send_signal(signal.SIGTERM)
    assert answers.only(probe(port, 20), [socket.gethostname()]) == ""


def test_probe_runs_until_its_input_ends(server: subprocess.Popen[bytes], port: int) -> None:
    """It prints a line after the first request, and its result at the end."""
    command = [sys.executable, str(POD / "probe.py"), "127.0.0.1", str(port), "0"]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == "sending\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        output, _ = process.communicate("\n", timeout=PATIENCE)
    seen = answers.parse(output)
    assert seen.requests > 1
    assert seen.pods == {socket.gethostname(): seen.requests}


def test_probe_counts_failures(port: int) -> None:
    """The result has the reasons."""
    seen = probe(port, 3)
    assert (seen.requests, seen.pods, seen.failed) == (3, {}, 3)
    assert "ConnectionRefusedError" in answers.only(seen, [])


@pytest.mark.parametrize("it", [*objects("pykubeproxy:1"), ingress()], ids=lambda it: it["kind"])
def test_objects_are_valid(it: dict[str, Any]) -> None:
    """All objects match the API's schemas and are in the temporary namespace; the ConfigMap has both programs."""
    kubernetes_validate.validate(it, kubernetes_validate.latest_version(), strict=True)
    assert (it["metadata"]["name"] if it["kind"] == "Namespace" else it["metadata"]["namespace"]) == NAMESPACE
    if it["kind"] == "ConfigMap":
        assert it["data"].keys() == {"server.py", "probe.py"}
