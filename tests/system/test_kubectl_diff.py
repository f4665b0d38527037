"""`kubectl pykubeproxy diff` finds the node of a lab whose agent stopped following the objects."""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest

from pykubeproxy.lab.cluster import Lab
from tests.fakes.kubectl import kubectl, needs_kubectl

pytestmark = [pytest.mark.root, needs_kubectl]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab with a Service; the test runs where clients of its API server are."""
    with Lab(f"td{os.getpid()}") as made, made.client.namespace.entered():
        made.service("web")
        made.until(lambda: diff(made, "--sync-period", "1").returncode == 0, "rules for web")
        yield made


def diff(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kubectl(lab, "pykubeproxy", "diff", "--all-nodes", *arguments)


def test_a_node_whose_proxy_stopped_is_named_with_its_services(lab: Lab) -> None:
    lab.agents["node2"].stop()
    lab.deploy("web", 2)
    lab.until(lambda: "2 endpoints" in diff(lab, "--sync-period", "1").stdout, "a stale node")
    done = diff(lab, "--sync-period", "2", "-o", "json")
    assert done.returncode == 1, done
    first, second = json.loads(done.stdout)["nodes"]
    assert (first["node"], first["verdict"], first["wrong"]) == ("node1", "follows", [])
    assert (second["node"], second["verdict"]) == ("node2", "differs")
    assert second["staleSince"]
    [service] = second["wrong"]
    assert (service["namespace"], service["name"]) == ("default", "web")
    assert service["differences"][0]["text"] == "rejected, should reach 2 endpoints"
    text = diff(lab, "--sync-period", "1").stdout
    assert "\nnode2: 1 wrong Service\n" in text


def test_a_node_that_follows_again_is_not_named(lab: Lab) -> None:
    lab.agents["node2"].start()
    lab.until(lambda: diff(lab, "--sync-period", "1").returncode == 0, "both nodes follow")
