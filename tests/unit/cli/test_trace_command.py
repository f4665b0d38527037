"""`pykubeproxy trace` with files."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pykubeproxy.cli.trace import trace
from tests.cases import load_case

CIDRS = "--cluster-cidr=10.244.0.0/16,fd00:10:244::/56"
POD, OUTSIDE, HERE = "10.244.1.11", "203.0.113.77", "192.168.99.10"


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    """A recorded load balancer with source ranges, node port 30080, cluster IP 10.96.1.1."""
    return written("lb-local", tmp_path)


def written(case: str, folder: Path) -> Path:
    found = load_case(case)
    path = folder / "objects.json"
    path.write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": [*found["objects"], found["node"]]})
    )
    return path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(trace, arguments)


def document(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    made: dict[str, Any] = json.loads(result.stdout)
    return made


def ends_of(made: dict[str, Any]) -> list[tuple[str, int, float, str | None]]:
    """Return the endpoints with their shares, and where packets to them are masqueraded."""
    (way,) = made["ways"]
    return [
        (it["address"], it["port"], it["probability"], it["masqueradedOn"])
        for it in way["ends"]
        if it["endpoint"]
    ]


def first_chain(made: dict[str, Any]) -> str:
    return str(made["ways"][0]["visits"][0]["steps"][0]["chain"])


def test_text(objects: Path) -> None:
    """Print text without styles if output is not a terminal."""
    result = invoke(POD, "10.96.1.1:80", "-f", str(objects), CIDRS)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[:6] == [
        f"pod {POD} goes to one of 2 endpoints of ns1/web:http, on node1 and node2;",
        "  the rules of node2 are unknown (not read; use `kubectl pykubeproxy trace`).",
        f"  {POD} on node1 to cluster IP 10.96.1.1:80, TCP",
        "",
        "50%  10.244.1.11:8080 on node1; masqueraded: sees an address of node1",
        "50%  10.244.2.12:8080 on node2; sees client 10.244.1.11",
    ]


def test_json(objects: Path) -> None:
    """Print the JSON document."""
    made = document(OUTSIDE, "10.96.1.1:80", "-f", str(objects), CIDRS)
    assert made["verdict"] == "likely"
    assert ends_of(made) == [
        ("10.244.1.11", 8080, 0.5, "node1"),
        ("10.244.2.12", 8080, 0.5, "node1"),
    ]
    assert first_chain(made) == "PREROUTING"


def test_picture(objects: Path) -> None:
    """Print an SVG document."""
    result = invoke(OUTSIDE, "10.96.1.1:80", "-f", str(objects), CIDRS, "-o", "svg")
    assert result.exit_code == 0
    assert result.stdout.startswith("<svg ")
    assert result.stdout.endswith("</svg>\n")
    assert ">10.244.2.12:8080 on node2;" in result.stdout


def test_protocol(objects: Path) -> None:
    """A Service does not match another protocol at the same port."""
    made = document(POD, "10.96.1.1:80", "--proto", "udp", "-f", str(objects), CIDRS)
    assert made["message"].endswith("Service ns1/web has no port 80/UDP.")
    assert ends_of(made) == []


@pytest.mark.parametrize(
    ("source", "options", "chain"),
    [
        (OUTSIDE, (), "PREROUTING"),
        (HERE, (), "OUTPUT"),
        ("127.0.0.1", (), "OUTPUT"),
        (OUTSIDE, ("--from", "node"), "OUTPUT"),
        (HERE, ("--from", "outside"), "PREROUTING"),
        (HERE, ("--from", "pod"), "PREROUTING"),
        (HERE, ("--in-interface", "eth0"), "PREROUTING"),
    ],
)
def test_origin(objects: Path, source: str, options: tuple[str, ...], chain: str) -> None:
    """A local source starts on the node, any other source outside, unless options say otherwise."""
    made = document(source, f"{HERE}:30080", "-f", str(objects), CIDRS, *options)
    assert first_chain(made) == chain


def test_node_address(objects: Path) -> None:
    """Node ports are served at --node-address."""
    there = ("--node-address", "10.9.9.9/24", "-f", str(objects), CIDRS)
    assert ends_of(document(OUTSIDE, "10.9.9.9:30080", *there))
    assert not ends_of(document(OUTSIDE, "10.9.9.9:30080", "-f", str(objects), CIDRS))


@pytest.mark.parametrize(
    ("options", "masquerade"),
    [
        ((), True),
        (("--from", "pod"), False),
        (("--in-interface", "cbr0"), False),
        (("--in-interface", "eth0", "--from", "pod"), True),
    ],
)
def test_pods_detected_by_interface(objects: Path, options: tuple[str, ...], masquerade: bool) -> None:
    """If the configuration detects pods by interface, --from pod uses that interface."""
    bridge = ("--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", "cbr0")
    made = document(OUTSIDE, "10.96.1.1:80", "-f", str(objects), *bridge, *options)
    assert {bool(it[3]) for it in ends_of(made)} == {masquerade}


def test_ipv6(tmp_path: Path) -> None:
    """An IPv6 destination needs brackets; the source may have them."""
    path = str(written("dual-stack", tmp_path))
    made = document("2001:db8::7", "[fd00:10:96::1]:80", "-f", path, CIDRS)
    assert ends_of(made)[0][0] == "fd00:10:244:1::11"
    assert document("[2001:db8::7]", "[FD00:10:96:0::1]:80", "-f", path, CIDRS) == made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((POD, "10.96.1.1"), '"10.96.1.1" has no port; use 10.96.1.1:PORT'),
        ((POD, "10.96.1.1:0"), "has no port from 1 to 65535"),
        ((POD, "10.96.1.1:65536"), "has no port from 1 to 65535"),
        ((POD, "10.96.1.1:http"), "has no port from 1 to 65535"),
        ((POD, "10.96.1.1:٣"), "has no port from 1 to 65535"),
        (("fd00::1", "fd00::2:80"), '"fd00::2:80" has no port; use [fd00::2:80]:PORT'),
        (("fd00::1", "[fe80::2%eth0]:80"), "names no destination; use svc/NAME"),
        (("pod", "10.96.1.1:80"), '"pod" is not an IP address; use pod/NAME'),
        ((POD, "10.96.1.1:80", "--from", "node", "--in-interface", "eth0"), "remove --in-interface"),
    ],
)
def test_invalid_arguments(objects: Path, arguments: tuple[str, ...], message: str) -> None:
    """The error names the expected form."""
    result = invoke(*arguments, "-f", str(objects))
    assert result.exit_code == 2
    assert message in result.stderr


def test_no_such_file() -> None:
    """An unreadable file is a one-line error."""
    result = invoke(POD, "10.96.1.1:80", "-f", "/nowhere.yaml")
    assert result.exit_code == 2
    assert result.stderr == "Error: cannot read manifests /nowhere.yaml: No such file or directory\n"
