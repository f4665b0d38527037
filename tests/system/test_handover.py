"""No connection fails over any hand-over of a node; `make handover` opens a million."""

import random
from pathlib import Path

import pytest

from pykubeproxy.kernel import Backend
from pykubeproxy.objects import Family
from tests.handover import handovers
from tests.handover.handovers import HandOver
from tests.handover.kube_proxy import KubeProxy, StandIn
from tests.handover.node import Node
from tests.handover.proof import Plan, prove

pytestmark = pytest.mark.root

RATE = 500.0


def plan(backend: Backend, captures: Path, *chosen: HandOver) -> Plan:
    """Return a plan for one round of these hand-overs."""
    return Plan(backend, random.randrange(1 << 32), 0, RATE, chosen, StandIn(), captures)


def test_no_connection_fails_over_any_handover(tmp_path: Path) -> None:
    """Through cluster IPs, node ports, external and load-balancer addresses, in both families, while endpoints change.

    One of the hand-overs, which come in random order, changes the backend.
    """
    seen = prove(plan(random.choice([*Backend]), tmp_path, *handovers.ALL))
    assert not seen.failures
    assert len([name for name in seen.counts if not name.startswith(("held ", "slow "))]) == 26
    assert min(count for name, count in seen.counts.items() if not name.startswith("slow ")) > 50


def test_the_first_failed_connection_is_captured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own packets are printed and written to a file, whatever its protocol."""

    def lose_rules(node: Node, _: KubeProxy, __: random.Random) -> None:
        node.agent.stop()
        node.tables(Family.IPV4).restore("*nat\n:KUBE-SERVICES - [0:0]\nCOMMIT\n")
        node.lab.until(lambda: bool([*tmp_path.glob("*.pcap")]), "there is a capture")

    seen = prove(plan(Backend.NFT, tmp_path, lose_rules))
    assert seen.failures
    printed = capsys.readouterr().out.splitlines()
    (noticed,) = (line for line in printed if line.startswith("first late or failed connection"))
    assert "during lose_rules" in noticed
    ends = noticed.rpartition(", ")[2]
    (captured,) = tmp_path.iterdir()
    assert len(captured.read_bytes()) > 100
    assert [line for line in printed if line != noticed and f" {ends} " in line]
