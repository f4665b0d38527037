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
from tests.bench.figures import merged
from tests.bench.page import PAGE, draw, filled
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
            printed, errors = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert not [name for name in netns.listnetns() if f"bench{process.pid}-" in name]
    (written,) = out.glob("*.json")
    return json.loads(written.read_bytes()), printed


def test_the_benchmark_measures_everything(tmp_path: Path) -> None:
    """Each part has plausible figures in the table, in the JSON and on the page."""
    report, table = bench(tmp_path, "--backend", "nft")
    assert report["notes"] == []
    measured = {figure["name"]: figure for figure in report["figures"] if figure["program"] == "pykubeproxy"}
    assert len(measured) == 26
    for name, figure in measured.items():
        assert figure["backend"] == "nft"
        assert figure["runs"]
        assert f"{name}, " in table
    assert 0.001 < measured["start"]["runs"][0] < 60
    assert 20 < measured["memory"]["runs"][0] <= measured["memory, peak"]["runs"][0] < 500
    failed = [it for it in report["figures"] if it["name"] == "rolling update, failed connections"]
    assert [it["runs"] for it in failed] == [[0], [0]]
    assert measured["rolling update, written"]["runs"][0] > 0
    alone = {figure["name"] for figure in report["figures"] if figure["program"] == "alone"}
    assert alone >= {"start", "new service", "changed endpoint", "flushed table", "check", "run --help"}
    figures = merged(file.read_bytes() for file in tmp_path.glob("*.json")).figures
    page = filled(PAGE.read_text(), figures)
    for label in ("40x2: start, s", "40x2, nft, iptables alone", "1x30, minSyncPeriod 1ms, nft, pykubeproxy"):
        assert f"| {label} | " in page
    assert "pykubeproxy, nft" in draw(figures)


def test_a_program_beyond_the_limit_is_noted_and_stopped(tmp_path: Path) -> None:
    """Its start has a limit instead of a value, and it has no other figures."""
    options = ("--backend", "legacy", "--only", "shapes", "--programs", "ours", "--limit", "0.01")
    report, table = bench(tmp_path, *options)
    (start,) = report["figures"]
    assert (start["name"], start["runs"], start["text"]) == ("start", [], "> 0.01 s")
    assert "! pykubeproxy, legacy, 40x2: not all services answer after 0.01 s" in table
