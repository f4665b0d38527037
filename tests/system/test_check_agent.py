"""`pykubeproxy check` on a node with a running agent."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, run_check, running, saved

pytestmark = pytest.mark.root


def of(document: dict[str, Any], name: str) -> list[tuple[str, str]]:
    return [(it["level"], it["message"]) for it in document["checks"] if it["check"] == name]


def test_check_passes_beside_the_agent(tmp_path: Path) -> None:
    """The agent's ports and rules are recognized, and the rules stay."""
    with inside_a_namespace(), server() as api:
        subprocess.run(["sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        api.store.create(node("node1", "192.168.99.10"))
        api.store.create(service("web"))
        api.store.create(slice_of("web", "10.244.0.1"))
        fixed = ("--hostname-override=node1", "--master", api.url)
        with running(tmp_path / "agent.log", *fixed) as agent:
            eventually(lambda: answers(HEALTH, "/healthz", 200) and answers(METRICS, "/healthz", 200))
            before = saved()
            document = run_check(0, *fixed)
            assert saved() == before
            assert of(document, "proxies") == [("ok", f"the agent is running (process {agent.pid})")]
            assert of(document, "ports") == [
                ("ok", f"the agent uses port {HEALTH}"),
                ("ok", f"the agent uses port {METRICS}"),
            ]
            assert of(document, "node") == [("ok", "the cluster has a Node node1")]
            assert " chains of a service proxy" in of(document, "tables")[0][1]
