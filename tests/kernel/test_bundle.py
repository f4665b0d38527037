"""A bundle of a network namespace has what is in it, from both backends."""

import io
import json
import socket
import tarfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pykubeproxy.bundle import layout
from pykubeproxy.bundle.layout import tables_file
from pykubeproxy.bundle.read import read_bundle
from pykubeproxy.bundle.sections import node_sections
from pykubeproxy.cli.dump_rules import dump_rules
from pykubeproxy.cli.trace import trace
from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.objects import Family
from tests.cases import as_restore_input
from tests.fakes.bundles import written

pytestmark = pytest.mark.root
NODE = "192.0.2.10"


@pytest.fixture
def bundle(inside: str, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with the rules of a case in nft and a rule in legacy, a route, a routing rule and a tracked connection."""
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    for line in (
        "link set lo up",
        f"address add {NODE}/24 dev lo",
        "link add pods type bridge",
        "link set pods up",
        "route add 10.244.1.0/24 dev pods",
        "route add 198.51.100.0/24 dev pods",
        "route add default dev pods table 7",
        "rule add fwmark 0x10/0x10 table 7",
    ):
        assert runner.run(("ip", *line.split())).exit_code == 0, line
    for family in Family:
        open_iptables(Backend.NFT, family, runner).restore(as_restore_input("dual-stack", family))
    legacy = open_iptables(Backend.LEGACY, Family.IPV4, runner)
    legacy.restore("*filter\n-A INPUT -m comment --comment mine -j ACCEPT\nCOMMIT\n")
    open_iptables(Backend.NFT, Family.IPV4, runner).restore(
        "*nat\n-A OUTPUT -d 198.51.100.1/32 -p udp -j DNAT --to-destination 192.0.2.10:9\nCOMMIT\n"
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", ("198.51.100.1", 80))
    firewall = "table inet fw { chain f { type filter hook forward priority 5; ip saddr 10.244.1.6 drop; }; }"
    assert runner.run(("nft", "-f", "-"), firewall).exit_code == 0
    path = tmp_path / "node.tar.gz"
    path.write_bytes(written(node_sections()))
    return path


def shown(command: click.Command, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    return result.exit_code, result.stdout


def test_bundle_of_a_node(bundle: Path) -> None:
    raw = bundle.read_bytes()
    read = read_bundle(io.BytesIO(raw), "b")
    assert [file for file in read.manifest.files if file.error] == []
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        texts = {member.name.rpartition("/")[2]: tar.extractfile(member).read().decode() for member in tar}  # type: ignore[union-attr]
    assert "] -A INPUT -m comment --comment mine -j ACCEPT" in texts[tables_file(Family.IPV4, "legacy")]
    assert "KUBE-SERVICES" in texts[tables_file(Family.IPV6, "nft")]
    assert "KUBE-SERVICES" in texts[layout.NFT_RULESET]
    assert NODE in read.addresses()
    assert {(route.network, route.interface) for route in read.routes()} >= {("10.244.1.0/24", "pods")}
    routes = json.loads(texts[layout.ROUTES])
    assert {"table": 7, "network": "0.0.0.0/0", "interface": "pods"}.items() <= next(
        route for route in routes if route["table"] == 7
    ).items()
    rules = json.loads(texts[layout.ROUTING_RULES])
    (rule,) = [rule for rule in rules if rule["table"] == 7]
    assert (rule["mark"], rule["action"], rule["family"]) == ("0x10/0x10", "lookup", "IPv4")
    assert {"name": "pods", "kind": "bridge"} in json.loads(texts[layout.INTERFACES])
    assert "net.ipv4.ip_forward = " in texts[layout.SYSCTLS]
    (service,) = json.loads(texts[layout.CONNTRACK])["IPv4"]["services"]
    assert service == {"protocol": "udp", "destination": "198.51.100.1:80", "entries": 1, "unreplied": 1}
    assert json.loads(texts[layout.VERSIONS])["iptables-nft"]
    # The bundle gives what the live tables give.
    for output in ("text", "rules"):
        assert shown(dump_rules, "--bundle", str(bundle), "-o", output) == shown(dump_rules, "-o", output)
    packet = ("10.244.1.5", "10.96.1.1:80", "-o", "json")
    assert shown(trace, *packet, "--bundle", str(bundle)) == shown(trace, *packet)
    dropped = ("10.244.1.6", "10.96.1.1:80")
    _, traced = shown(trace, *dropped, "--bundle", str(bundle))
    assert "dropped on this node in inet fw f" in traced
    assert (0, traced) == shown(trace, *dropped)


def test_flows_are_saved_on_request_only(bundle: Path, tmp_path: Path) -> None:
    """They have addresses of clients. Trace finds the packet of the fixture, which nobody answers."""
    packet = (NODE, "198.51.100.1:80", "--proto", "udp", "--conntrack")
    _, without = shown(trace, *packet, "--bundle", str(bundle))
    assert "has no flows" in " ".join(without.split())
    with_flows = tmp_path / "flows.tar.gz"
    with_flows.write_bytes(written(node_sections(with_flows=True)))
    saved, live = (
        json.loads(shown(trace, *packet, *options, "-o", "json")[1])["tracked"]
        for options in (("--bundle", str(with_flows)), ())
    )
    ((flow,),) = (node["flows"] for node in saved)
    assert (flow["endpoint"], flow["problem"]) == (f"{NODE}:9", "unanswered")
    assert [(one["source"], one["endpoint"]) for node in live for one in node["flows"]] == [
        (flow["source"], f"{NODE}:9")
    ]


def test_flows_of_rules_in_a_file_are_refused(bundle: Path) -> None:
    """A file of rules has none."""
    result = CliRunner().invoke(trace, ["10.244.1.5", "10.96.1.1:80", "--rules", "x", "--conntrack"])
    assert result.exit_code == 2
    assert "--conntrack reads this node or a bundle" in result.stderr
