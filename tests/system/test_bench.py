"""The benchmarks run on a small workload; the tests assert no times."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import netns

from tests.bench.plan import QUICK as EFFORT
from tests.bench.plan import ROWS, Scale, steps
from tests.bench.workload import Size

EVERYTHING = {
    "start",
    "CPU of a start",
    "data received at a start",
    "memory",
    "memory, peak",
    "one endpoint changed",
    "one chain restored",
    "CPU of an idle minute",
    "CPU of 1000 changes",
    "first packet, p50",
    "first packet, p99",
    "past the rules, p50",
    "past the rules, p99",
    "without rules, p50",
    "without rules, p99",
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
@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_everything_is_measured(tmp_path: Path, backend: str) -> None:
    """Each row has plausible figures in the table and in the JSON."""
    report, table = bench(tmp_path, "--backend", backend, "--sizes", "0x1,4x2", "--services", "4")
    assert report["notes"] == []
    measured = {figure["name"]: figure for figure in report["figures"]}
    assert measured.keys() == EVERYTHING
    for name, figure in measured.items():
        assert figure["backend"] == backend
        assert all(run > 0 for run in figure["runs"]) or name.startswith("CPU"), name
        assert f"{name}, " in table
    assert 0.001 < measured["start"]["value"] < 60
    assert 20 < measured["memory"]["value"] <= measured["memory, peak"]["value"] < 500
    assert 1 < measured["without rules, p50"]["value"] <= measured["without rules, p99"]["value"]
    assert any(target["target"] == "≤ 75 MB" and target["ratio"] for target in report["targets"])


@pytest.mark.root
def test_compares_a_peer(tmp_path: Path) -> None:
    """The report compares a peer with pykubeproxy; a peer that exits is noted with its last line."""
    peer = tmp_path / "peer"
    script = f"#!/bin/sh\nexec {sys.executable} -c 'from pykubeproxy.cli import main; main()' run \"$@\"\n"
    peer.write_text(script)
    peer.chmod(0o755)
    options = ("--backend", "nft", "--rows", "start,change", "--sizes", "4x2", "--peer", str(peer))
    report, table = bench(tmp_path / "good", *options)
    assert report["notes"] == []
    assert {figure["name"] for figure in report["figures"] if figure["program"] == "kube-proxy"} == {
        "start",
        "CPU of a start",
        "data received at a start",
        "one endpoint changed",
    }
    (line,) = [line for line in table.splitlines() if line.startswith("start, 4 x 2")]
    ours, theirs, ratio = float(line.split()[4]), float(line.split()[6]), float(line.split()[8])
    assert ratio == pytest.approx(ours / theirs, abs=0.02)
    peer.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    report, _ = bench(tmp_path / "bad", *options)
    assert report["notes"] == ["kube-proxy, nft, 4x2: exited with status 3: no such luck"]
    assert {figure["program"] for figure in report["figures"]} == {"pykubeproxy", "iptables-restore"}


def test_long_measurements_run_only_at_the_ends() -> None:
    """Changes and idle minutes are measured at the smallest and largest number of Services only."""
    sizes = tuple(map(Size.read, ("0x1", "500x10", "1000x10", "5000x10", "5000x20")))
    found = {step.size: step.rows for step in steps(Scale(sizes, (100,)), ROWS, EFFORT)}
    assert [str(size) for size, rows in found.items() if "idle" in rows] == ["500x10", "5000x10"]
    assert [str(size) for size, rows in found.items() if "first" in rows] == ["100x2"]
    assert all("memory" in found[size] for size in sizes)
