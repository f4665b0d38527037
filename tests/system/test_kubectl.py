"""The plugin as kubectl runs it, against the API server and the nodes of a lab."""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from pykubeproxy.lab.cluster import Lab
from tests.fakes.kubectl import kubectl, needs_kubectl

pytestmark = [pytest.mark.root, needs_kubectl]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A lab with a Service; the test runs where clients of its API server are."""
    with Lab(f"tk{os.getpid()}") as made, made.client.namespace.entered():
        made.service("web")
        made.until(lambda: "web" in plugin(made, "dump-rules", "--all-nodes").stdout, "rules for web")
        yield made


def plugin(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    return kubectl(lab, "pykubeproxy", *arguments)


def services(text: str) -> list[dict[str, Any]]:
    """Return the services of a document, without the counters of their endpoints."""
    found: list[dict[str, Any]] = json.loads(text)["nodes"][0]["services"]
    for endpoint in (endpoint for it in found for endpoint in it["endpoints"]):
        del endpoint["packets"], endpoint["bytes"]
    return found


def test_both_agents_are_healthy(lab: Lab) -> None:
    done = plugin(lab, "status", "--all-nodes", "-o", "json")
    assert done.returncode == 0, done
    assert [(it["node"], it["agent"]["node"]) for it in json.loads(done.stdout)["nodes"]] == [
        ("node1", "node1"),
        ("node2", "node2"),
    ]


def test_rules_are_those_that_the_node_shows(lab: Lab) -> None:
    """The outer command reads through iptables-save, the inner one the live tables."""
    outer = plugin(lab, "dump-rules", "--node", "node1", "-o", "json").stdout
    inner = kubectl(
        lab,
        *("exec", "-n", "kube-system", "pykubeproxy-node1", "--", "pykubeproxy", "dump-rules", "-o", "json"),
    )
    assert services(outer) == services(inner.stdout) != []


def test_debug_pods_come_and_go(lab: Lab) -> None:
    command = ("dump-rules", "web", "--all-nodes", "--pod-selector", "app=none", "--debug-image", "any")
    done = plugin(lab, *command)
    assert done.returncode == 0, done
    assert done.stdout.count("pod kube-system/pykubeproxy-debug-") == 2
    assert done.stdout.count("default/web") == 4  # two families on two nodes
    assert "debug" not in kubectl(lab, "get", "pods", "-A").stdout


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
