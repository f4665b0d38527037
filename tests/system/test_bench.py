"""The benchmarks run, on next to no work. What they measure is theirs to say: no time is asserted here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import netns

from tests.bench.plan import QUICK as EFFORT
from tests.bench.plan import ROWS, Scale, stations
from tests.bench.work import Size

EVERYTHING = {
    "start",
    "CPU of a start",
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
    """What it wrote as JSON, and what it printed. No namespace is left behind."""
    command = [sys.executable, "-m", "tests.bench", "--quick", "--out", str(out), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed, complaints = process.communicate(timeout=150)
        finally:
            process.kill()
    assert process.returncode == 0, complaints
    assert not [name for name in netns.listnetns() if f"bench{process.pid}-" in name]
    return json.loads((out / "bench.json").read_bytes()), printed


@pytest.mark.root
@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_everything_is_measured(tmp_path: Path, backend: str) -> None:
    """Each row gives figures that can be true, in the table and in the JSON."""
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
def test_another_program_on_the_same_work(tmp_path: Path) -> None:
    """A peer stands next to ours with the ratio of the two; one that ends by itself is noted, with its last line."""
    peer = tmp_path / "peer"
    script = f"#!/bin/sh\nexec {sys.executable} -c 'from pykubeproxy.cli import main; main()' run \"$@\"\n"
    peer.write_text(script)
    peer.chmod(0o755)
    options = ("--backend", "nft", "--rows", "start,change", "--sizes", "4x2", "--peer", str(peer))
    report, table = bench(tmp_path / "good", *options)
    assert report["notes"] == []
    assert {figure["name"] for figure in report["figures"] if figure["subject"] == "kube-proxy"} == {
        "start",
        "CPU of a start",
        "one endpoint changed",
    }
    (line,) = [line for line in table.splitlines() if line.startswith("start, 4 x 2")]
    ours, theirs, ratio = float(line.split()[4]), float(line.split()[6]), float(line.split()[8])
    assert ratio == pytest.approx(ours / theirs, abs=0.02)
    peer.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    report, _ = bench(tmp_path / "bad", *options)
    assert report["notes"] == ["kube-proxy, nft, 4x2: ended with exit code 3: no such luck"]
    assert {figure["subject"] for figure in report["figures"]} == {"pykubeproxy", "iptables-restore"}


def test_what_takes_long_is_done_at_the_ends() -> None:
    """Changes and idle minutes are measured at the fewest and the most Services alone, first packets apart."""
    sizes = tuple(map(Size.read, ("0x1", "500x10", "1000x10", "5000x10", "5000x20")))
    found = {station.size: station.rows for station in stations(Scale(sizes, (100,)), ROWS, EFFORT)}
    assert [str(size) for size, rows in found.items() if "idle" in rows] == ["500x10", "5000x10"]
    assert [str(size) for size, rows in found.items() if "first" in rows] == ["100x2"]
    assert all("memory" in found[size] for size in sizes)
