"""The lab's API server as a process of its own."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web"},
    "spec": {"ports": [{"port": 80}]},
}
NODE_LIST = {"apiVersion": "v1", "kind": "NodeList", "items": [{"metadata": {"name": "n1"}}]}


Start = Callable[..., tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts the server with some options and returns the process and its first line."""
    started = []

    def run(*options: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "pykubeproxy.lab.apiserver", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout
        return process, process.stdout.readline().strip()

    yield run
    for process in started:
        process.kill()
        process.communicate()


def get(url: str, token: str) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return json.loads(answer.read())


def test_serves_objects_from_a_file_and_leaves_at_sigterm(start: Start, tmp_path: Path) -> None:
    """The first line is its URL; it serves the file's objects and exits 0."""
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all([SERVICE, NODE_LIST]))
    config = tmp_path / "kubeconfig"
    process, url = start(
        "--objects", str(tmp_path / "objects.yaml"), "--token", "t", "--kubeconfig", str(config)
    )
    assert get(f"{url}/api/v1/services", "t")["items"][0]["spec"]["clusterIP"].startswith("10.96.")
    assert get(f"{url}/api/v1/nodes", "t")["items"][0]["metadata"]["name"] == "n1"
    assert yaml.safe_load(config.read_text())["clusters"][0]["cluster"]["server"] == url
    watch = urllib.request.Request(f"{url}/api/v1/nodes?watch=1", headers={"Authorization": "Bearer t"})
    with urllib.request.urlopen(watch, timeout=10) as events:
        assert json.loads(events.readline())["type"] == "ADDED"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert process.stderr
    assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--listen", "nowhere"], "is not ADDR:PORT"),
        (["--listen", "192.0.2.1:0"], "annot assign requested address"),
        (["--tls-key", __file__], "go together"),
        (["--objects", "/nonexistent"], "does not exist"),
    ],
)
def test_wrong_options_end_with_a_message(start: Start, options: list[str], message: str) -> None:
    """A non-zero exit and a line that says what is wrong."""
    process, _ = start(*options)
    assert process.wait(10) != 0
    assert process.stderr
    assert message in process.stderr.read()
