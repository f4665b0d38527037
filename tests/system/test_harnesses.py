"""Short runs of the hand-over test, the soak test, the faults of a lab and the benchmark."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import netns

from pykubeproxy.kernel import Backend
from pykubeproxy.lab.agents import kube_proxy_binary
from tests.fakes.kubectl import needs_kubectl
from tests.fuzz import faults
from tests.handover import handovers
from tests.handover.handovers import StandIn
from tests.handover.proof import Plan, prove
from tests.soak.soak import new_seed, soak

pytestmark = pytest.mark.root


def test_no_connection_fails_over_any_handover(tmp_path: Path) -> None:
    """Through cluster IPs, node ports, external and load-balancer addresses, in both families, while endpoints change.

    One of the hand-overs, which come in random order, changes the backend.
    """
    backend, seed = random.choice([*Backend]), random.randrange(1 << 32)
    seen = prove(Plan(backend, seed, 0, 500.0, handovers.ALL, StandIn(), tmp_path))
    assert not seen.failures
    assert len([name for name in seen.counts if not name.startswith(("held ", "slow "))]) == 26
    assert min(count for name, count in seen.counts.items() if not name.startswith("slow ")) > 50


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_soak(backend: str) -> None:
    """No connection fails because of the agent, the rules equal a fresh start's, and memory does not grow."""
    assert soak(backend, new_seed(), 6.0) == []


@needs_kubectl
def test_live_traces_name_no_wrong_fault() -> None:
    """The seed gives five kinds of faults, two of them at once."""
    assert faults.fuzz(6, 3) == []


@needs_kubectl
@pytest.mark.skipif("KUBE_PROXY" not in os.environ, reason="KUBE_PROXY names no kube-proxy binary")
@pytest.mark.parametrize("mode", ["iptables", "nftables"])
def test_live_traces_name_no_wrong_fault_of_kube_proxy(mode: str) -> None:
    binary = kube_proxy_binary(Path(os.environ["KUBE_PROXY"]), mode)
    assert faults.fuzz(4, 3, kube_proxy=binary) == []


def bench(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Return the JSON report and the standard output of a run. Check that no namespace is left."""
    command = [sys.executable, "-m", "tests.bench", "--quick", "--out", str(out), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed, errors = process.communicate(timeout=150)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert not [name for name in netns.listnetns() if f"bench{process.pid}-" in name]
    return json.loads((out / "bench.json").read_bytes()), printed


def test_the_benchmark_measures_everything(tmp_path: Path) -> None:
    """Each row has plausible figures in the table and in the JSON."""
    report, table = bench(tmp_path, "--backend", "nft", "--sizes", "0x1,4x2", "--services", "4")
    assert report["notes"] == []
    measured = {figure["name"]: figure for figure in report["figures"] if figure["program"] == "pykubeproxy"}
    assert len(measured) == 20
    for name, figure in measured.items():
        assert figure["backend"] == "nft"
        assert all(run > 0 for run in figure["runs"]) or name.startswith("CPU"), name
        assert f"{name}, " in table
    assert 0.001 < measured["start"]["value"] < 60
    assert 20 < measured["memory"]["value"] <= measured["memory, peak"]["value"] < 500
    alone = {figure["name"] for figure in report["figures"] if figure["program"] == "alone"}
    assert alone >= {"start", "one endpoint changed", "repair, all serve", "check", "run --help"}
    assert measured["without rules"]["value"] > 1
    (memory,) = [it for it in report["targets"] if it["name"] == "memory"]
    assert (memory["target"], memory["size"]) == ("≤ 45 MB", "0x1")
    assert memory["ratio"] > 0
    assert memory["reached"] == (memory["ratio"] <= 1)
    assert {it["variant"] for it in report["figures"]} == {"", "flat", "tree", "kubeconfig"}
