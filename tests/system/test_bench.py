"""The benchmarks run on a small workload; the tests assert no times."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import netns

MEASURED = {
    "start",
    "CPU of a start",
    "received at a start",
    "first list requested",
    "memory",
    "memory, peak",
    "one endpoint changed",
    "CPU of an idle minute",
    "CPU of 1000 changes",
    "first packet, p50",
    "first packet, p99",
    "past the rules, p50",
    "past the rules, p99",
    "without rules, p50",
    "without rules, p99",
    "repair, half serve",
    "repair, all serve",
    "run --help",
    "dump-rules of a service",
    "trace to a service",
    "explain of a service",
    "check",
    "check, requests",
    "diff",
    "diff, requests",
    "diff, objects of the agent",
}


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


@pytest.mark.root
def test_everything_is_measured(tmp_path: Path) -> None:
    """Each row has plausible figures in the table and in the JSON."""
    report, table = bench(tmp_path, "--backend", "nft", "--sizes", "0x1,4x2", "--services", "4")
    assert report["notes"] == []
    measured = {figure["name"]: figure for figure in report["figures"] if figure["program"] == "pykubeproxy"}
    assert measured.keys() == MEASURED
    for name, figure in measured.items():
        assert figure["backend"] == "nft"
        assert all(run > 0 for run in figure["runs"]) or name.startswith("CPU"), name
        assert f"{name}, " in table
    assert 0.001 < measured["start"]["value"] < 60
    assert 20 < measured["memory"]["value"] <= measured["memory, peak"]["value"] < 500
    alone = {figure["name"] for figure in report["figures"] if figure["program"] == "alone"}
    assert alone >= {"start", "one endpoint changed", "repair, all serve", "check", "run --help"}
    assert 1 < measured["without rules, p50"]["value"] <= measured["without rules, p99"]["value"]
    (memory,) = [it for it in report["targets"] if it["name"] == "memory"]
    assert (memory["target"], memory["size"]) == ("≤ 45 MB", "0x1")
    assert memory["ratio"] > 0
    assert memory["reached"] == (memory["ratio"] <= 1)
    assert {it["variant"] for it in report["figures"]} == {"", "flat", "tree", "kubeconfig"}


@pytest.mark.root
def test_compares_another_checkout_and_a_peer(tmp_path: Path) -> None:
    """The report has their ratios; a peer that exits is noted with its last line, and the others go on."""
    peer, started = tmp_path / "peer", tmp_path / "started"
    lines = (
        "#!/bin/sh",
        f"if [ -e {started} ]; then echo no such luck >&2; exit 3; fi",
        f"touch {started}",
        f"exec {sys.executable} -c 'from pykubeproxy.cli import main; main()' run \"$@\"",
    )
    peer.write_text("\n".join(lines))
    peer.chmod(0o755)
    options = (
        "--backend",
        "legacy",
        "--only",
        "starts",
        "--sizes",
        "4x2",
        "--runs",
        "2",
        "--peer",
        str(peer),
    )
    report, table = bench(tmp_path / "out", *options, "--against", str(Path(__file__).parents[2]))
    assert report["notes"] == ["kube-proxy, legacy, 4x2: exited with status 3: no such luck"]
    for program, runs in (("pykubeproxy", 2), ("before", 2), ("kube-proxy", 1)):
        figures = [figure for figure in report["figures"] if figure["program"] == program]
        assert {figure["name"]: len(figure["runs"]) for figure in figures} == {
            "start": runs,
            "CPU of a start": runs,
            "received at a start": runs,
            "first list requested": runs,
            "memory": runs,
            "memory, peak": runs,
        }
    (line,) = [line for line in table.splitlines() if line.startswith("start, 4x2")]
    ours, before, ratio = float(line.split()[2]), float(line.split()[4]), float(line.split()[6])
    assert ratio == pytest.approx(ours / before, rel=0.02)
