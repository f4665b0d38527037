"""Files with the output of iptables-save read as the live tables do."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from pykubeproxy.cli.diff import diff
from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.cli.trace import trace
from pykubeproxy.kernel import Backend, Runner, local_addresses, open_iptables
from pykubeproxy.objects import Family
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.root

OBJECTS = Path(__file__).parents[1] / "data" / "manifests" / "explain.yaml"
PROGRAM = Path(sys.executable).with_name("pykubeproxy")
OPTIONS = ("--hostname-override", "node1", "--cluster-cidr", "10.244.0.0/16")


@pytest.fixture
def saved(
    inside: str, backend: Backend, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The rules of an agent, some with counters and a rule of another program, as iptables-save prints them."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    runner.run(("ip", "link", "set", "lo", "up"))
    runner.run(("ip", "address", "add", "192.0.2.10/24", "dev", "lo"))
    options = (*OPTIONS, "--iptables-backend", backend.value, "--conntrack-max-per-core", "0")
    once = ["run", "--manifests", str(OBJECTS), "--once", *options]
    subprocess.run([PROGRAM, *once], check=True, capture_output=True, timeout=PATIENCE)
    both = [open_iptables(backend, family, runner) for family in Family]
    both[0].restore("*filter\n-I FORWARD 1 -s 198.51.100.0/24 -m comment --comment mine -j DROP\nCOMMIT\n")
    path = tmp_path / "rules.txt"
    path.write_text("".join(runner.run((tables.tools.save, "-c")).stdout for tables in both))
    return path


def shown(command: click.Command, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    return result.exit_code, result.stdout


def nodes_of(document: str) -> list[dict[str, Any]]:
    """Return the nodes of a document in JSON or YAML, without their names."""
    return [{**node, "node": None} for node in yaml.safe_load(document)["nodes"]]


def test_dump_rules_of_a_file_equals_that_of_live_tables(saved: Path, backend: Backend) -> None:
    for output in ("text", "wide", "json", "yaml", "name", "rules"):
        live = shown(dump_rules, "-o", output, "--iptables-backend", backend.value)
        assert live[0] == 0
        assert "web" in live[1] or output == "rules"
        of_file = shown(dump_rules, "-o", output, "--rules", str(saved))
        if output in ("json", "yaml"):  # a file does not tell the name of the node
            assert nodes_of(of_file[1]) == nodes_of(live[1])
        else:
            assert of_file == live


def test_trace_through_a_file_equals_that_through_live_tables(saved: Path, backend: Backend) -> None:
    """With the node's addresses, and an interface as the file has no routes."""
    addresses = [text for local in local_addresses(Family.IPV4) for text in ("--node-address", local.address)]
    for packet in (
        ("10.244.1.5", "10.96.0.10:53", "--proto", "udp", "--in-interface", "eth0"),
        ("198.51.100.7", "192.0.2.10:30080", "--in-interface", "eth0"),
        ("192.0.2.10", "10.96.0.1:443"),
    ):
        for output in ("text", "json"):
            live = shown(trace, *packet, "-o", output, "--iptables-backend", backend.value)
            assert live[0] == 0
            assert shown(trace, *packet, "-o", output, "--rules", str(saved), *addresses) == live


def test_diff_of_a_file_equals_that_of_live_tables(saved: Path, backend: Backend) -> None:
    """Except for the name of the rules. The objects differ from those that the agent had."""
    changed = saved.with_name("changed.yaml")
    changed.write_text(OBJECTS.read_text().replace("10.244.1.9", "10.244.1.8"))
    for output in ("text", "wide", "name", "rules", "json"):
        arguments = ("-f", str(changed), *OPTIONS, "-o", output)
        status, live = shown(diff, *arguments, "--iptables-backend", backend.value)
        assert (status, "10.244.1.8" in live or output == "name") == (1, True)
        live = live.replace(f"live rules ({backend.value})", f"rules in {saved}")
        found = shown(diff, *arguments, "--rules", str(saved))
        # Long names change the lines of words.
        assert (found[0], found[1].split()) == (1, live.split())


def test_diff_of_a_healthy_node_finds_nothing(saved: Path) -> None:
    assert shown(diff, "--rules", str(saved), "-f", str(OBJECTS), *OPTIONS) == (0, "")
