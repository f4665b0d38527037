"""The benchmarks run on a small workload; the tests assert no times."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import netns

# Each backend is measured in these; the rest, the same for both, on one of them.
BOTH = {
    "start",
    "CPU of a start",
    "received at a start",
    "first list requested",
    "memory",
    "memory, peak",
    "one endpoint changed",
    "CPU of an idle minute",
    "CPU of 1000 changes",
}
NFT = {
    "repair, half serve",
    "repair, all serve",
    "first packet, p50",
    "first packet, p99",
    "past the rules, p50",
    "past the rules, p99",
    "without rules, p50",
    "without rules, p99",
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
@pytest.mark.parametrize(
    ("backend", "options", "expected"),
    [("nft", (), BOTH | NFT), ("legacy", ("--only", "starts,changes"), BOTH)],
)
def test_everything_is_measured(
    tmp_path: Path, backend: str, options: tuple[str, ...], expected: set[str]
) -> None:
    """Each row has plausible figures in the table and in the JSON."""
    report, table = bench(tmp_path, "--backend", backend, "--sizes", "4x2", "--services", "4", *options)
    assert report["notes"] == []
    measured = {figure["name"]: figure for figure in report["figures"] if figure["program"] == "pykubeproxy"}
    assert measured.keys() == expected
    for name, figure in measured.items():
        assert figure["backend"] == backend
        assert all(run > 0 for run in figure["runs"]) or name.startswith("CPU"), name
        assert f"{name}, " in table
    assert 0.001 < measured["start"]["value"] < 60
    assert 20 < measured["memory"]["value"] <= measured["memory, peak"]["value"] < 500
    alone = {figure["name"] for figure in report["figures"] if figure["program"] == "alone"}
    assert alone >= {"start", "one endpoint changed"}
    if backend == "nft":
        assert alone >= {"repair, all serve", "check", "run --help"}
        assert 1 < measured["without rules, p50"]["value"] <= measured["without rules, p99"]["value"]
        assert {it["variant"] for it in report["figures"]} == {"", "flat", "tree", "kubeconfig"}


@pytest.mark.root
def test_compares_another_checkout_and_a_peer(tmp_path: Path) -> None:
    """The report has their ratios; a peer that exits is noted with its last line."""
    peer = tmp_path / "peer"
    script = f"#!/bin/sh\nexec {sys.executable} -c 'from pykubeproxy.cli import main; main()' run \"$@\"\n"
    peer.write_text(script)
    peer.chmod(0o755)
    options = ("--backend", "nft", "--only", "starts", "--sizes", "4x2", "--peer", str(peer))
    report, table = bench(tmp_path / "good", *options, "--against", str(Path(__file__).parents[2]))
    assert report["notes"] == []
    for program in ("before", "kube-proxy"):
        assert {figure["name"] for figure in report["figures"] if figure["program"] == program} == {
            "start",
            "CPU of a start",
            "received at a start",
            "first list requested",
            "memory",
            "memory, peak",
        }
    (line,) = [line for line in table.splitlines() if line.startswith("start, 4x2")]
    ours, before, ratio = float(line.split()[2]), float(line.split()[4]), float(line.split()[6])
    assert ratio == pytest.approx(ours / before, rel=0.02)
    peer.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    report, _ = bench(tmp_path / "bad", *options)
    assert report["notes"] == ["kube-proxy, nft, 4x2: exited with status 3: no such luck"]
    assert {figure["program"] for figure in report["figures"]} == {"pykubeproxy", "alone"}
