"""The guard of 127.0.0.0/8 and route_localnet."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pykubeproxy.agent.node_rules import guard_loopback, route_loopback, serves_node_ports
from pykubeproxy.config import Config, load
from pykubeproxy.kernel import Failed
from pykubeproxy.objects import Family
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.options import RuleOptions
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.iptables import FakeIptables

GUARD = skeleton.kubelet_firewall(RuleOptions(Family.IPV4))
INPUT = ChainKey("filter", "INPUT")


def config(addresses: str = "", enabled: bool = True) -> Config:
    flags = {"nodeport-addresses": addresses, "iptables-localhost-nodeports": str(enabled).lower()}
    return load(None, flags).config


def setting(root: Path, value: str) -> Path:
    """Create a fake route_localnet and return its path."""
    path = root / "proc/sys/net/ipv4/conf/all/route_localnet"
    path.parent.mkdir(parents=True)
    path.write_text(value)
    return path


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ("", True),
        ("127.0.0.0/8", True),
        ("127.0.0.1/32,10.0.0.0/8", True),
        ("0.0.0.0/0", True),
        ("fd00::/64", True),
        ("10.0.0.0/8", False),
        ("primary", False),
        ("primary,fd00::/64", False),
        ("primary,localhost", True),
        ("all", True),
    ],
)
def test_node_ports_on_loopback(addresses: str, expected: bool, tmp_path: Path) -> None:
    """Only with localhostNodePorts, and if nodePortAddresses include 127.0.0.0/8; else nothing is written."""
    on, tables, path = config(addresses), FakeIptables(), setting(tmp_path, "0\n")
    assert serves_node_ports(on) is expected
    assert not serves_node_ports(config(addresses, enabled=False))
    assert guard_loopback(on, tables) is bool(tables.texts) is expected
    route_loopback(on, tmp_path)
    assert path.read_text().startswith("1") is expected


@pytest.mark.parametrize("there", [(), ("-j DROP",), GUARD], ids=["no-chain", "kubelet", "rule"])
def test_only_the_missing_part_of_the_guard_is_written(there: tuple[str, ...]) -> None:
    """Rules of the kubelet in the same chain stay; a second call writes nothing."""
    tables = FakeIptables()
    if there:
        tables.restore(
            "*filter\n:KUBE-FIREWALL - [0:0]\n"
            + "".join(f"-A KUBE-FIREWALL {it}\n" for it in there)
            + "COMMIT\n"
        )
    assert guard_loopback(config(), tables)
    live = tables.save(("filter",)).chains
    assert live[skeleton.KUBELET_FIREWALL] == tuple(dict.fromkeys((*there, *GUARD)))
    assert live[INPUT] == ("-j KUBE-FIREWALL",)
    written = list(tables.texts)
    assert guard_loopback(config(), tables)
    assert tables.texts == written


def test_a_guard_that_cannot_be_written_is_logged() -> None:
    tables = FakeIptables()
    tables.failure = Failed("iptables-restore", 4, "no memory")
    with capture_logs() as logs:
        assert not guard_loopback(config(), tables)
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("loopback guard failed", "warning")
    assert "no memory" in line["error"]
