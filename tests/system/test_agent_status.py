"""The status of a running agent: the page, the JSON and the command."""

import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.agent.observe.status import decode
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import METRICS, inside_a_namespace, running

pytestmark = pytest.mark.root

MANIFESTS = Path(__file__).parents[1] / "data" / "manifests" / "explain.yaml"
STATUS = (sys.executable, "-c", "from pykubeproxy.cli import main; main()", "status")


def test_page_json_and_command_agree(tmp_path: Path) -> None:
    """An agent on manifests shows services, shares and syncs; the command reports a missing agent."""
    flags = ("--manifests", str(MANIFESTS), "--hostname-override", "node1", "--cluster-cidr", "10.244.0.0/16")
    with inside_a_namespace():
        with running(tmp_path / "log", *flags):
            eventually(lambda: b"rules in place" in (tmp_path / "log").read_bytes())
            answer = fetch(METRICS, "/statusz?service=ns/web", accept="application/json")
            status = decode(answer.body.encode())
            assert (status.healthy, status.node, status.matching) == (True, "node1", 1)
            assert {sync.family for sync in status.syncs} == {"IPv4", "IPv6"}
            assert [(port.policy, [it.share for it in port.endpoints]) for port in status.services] == [
                ("Cluster", [1.0, 0.0, 0.0]),
                ("Local", [1.0, 0.0, 0.0]),
            ]
            page = fetch(METRICS, "/statusz", accept="text/html")
            assert "kube-system/dns:dns-tcp" in page.body
            assert page.headers["Cache-Control"] == "no-store"
            assert "kube-proxy statusz" in fetch(METRICS, "/statusz").body
            result = subprocess.run(STATUS, capture_output=True, text=True)
            assert (result.returncode, result.stderr) == (0, "")
            assert result.stdout.startswith("node1  ")
        gone = subprocess.run(STATUS, capture_output=True, text=True)
        assert (gone.returncode, gone.stdout) == (2, "")
        assert "cannot reach an agent at http://127.0.0.1:10249: Connection refused" in gone.stderr
