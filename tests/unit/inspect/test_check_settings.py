"""Preflight checks of kernel settings."""

import pytest

from pykubeproxy.inspect.check.report import Level
from pykubeproxy.inspect.check.this_node import bridged, connections, forwarding, node_ports, reverse_path
from pykubeproxy.objects import Family

NODE_PORTS = (30000, 32767)


@pytest.mark.parametrize(
    ("local", "reserved", "level"),
    [
        ("32768\t60999", "", Level.OK),
        ("32767 60999", "", Level.WARN),
        ("1024 65535", "", Level.WARN),
        ("1024 30000", None, Level.WARN),
        ("1024 29999", None, Level.OK),
        ("31000 31010", "", Level.WARN),
        ("1024 65535", "30000-32767", Level.OK),
        ("1024 65535", "1-40000", Level.OK),
        ("1024 65535", "22,29990-31000,31001,31002-32767,40000", Level.OK),
        ("1024 65535", "30000-31000,31002-32767", Level.WARN),
        ("1024 65535", "30001-32767", Level.WARN),
        ("1024 65535", "30000-32766", Level.WARN),
        ("31000 60999", "31000-32767", Level.OK),
        (None, None, Level.SKIP),
    ],
)
def test_node_ports_in_the_local_port_range_are_a_warning(
    local: str | None, reserved: str | None, level: Level
) -> None:
    """Unless all of them are reserved."""
    assert node_ports(NODE_PORTS, local, reserved).level is level


def test_node_port_advice_keeps_reserved_ports() -> None:
    advice = node_ports(NODE_PORTS, "1024 65535", "8080").advice
    assert "net.ipv4.ip_local_reserved_ports = 8080,30000-32767," in advice


@pytest.mark.parametrize(
    ("count", "most", "level"),
    [
        ("0", "262144", Level.OK),
        ("799", "1000", Level.OK),
        ("800", "1000", Level.WARN),
        ("979", "1000", Level.WARN),
        ("980", "1000", Level.FAIL),
        ("1000", "1000", Level.FAIL),
        ("5000", "0", Level.OK),
        (None, None, Level.SKIP),
        ("0", None, Level.SKIP),
    ],
)
def test_a_full_conntrack_table_fails(count: str | None, most: str | None, level: Level) -> None:
    """A nearly full one is a warning; a limit of 0 means none."""
    assert connections(count, most).level is level


def test_conntrack_advice_has_a_number() -> None:
    found = connections("262144", "262144")
    assert found.message == "262144 connections of 262144 tracked (100%)"
    assert "524288" in found.advice


@pytest.mark.parametrize(
    ("value", "needed", "level"),
    [
        ("1", True, Level.OK),
        ("2", True, Level.OK),
        ("1", False, Level.OK),
        ("0", True, Level.FAIL),
        ("0", False, Level.OK),
        (None, True, Level.FAIL),
        (None, False, Level.OK),
    ],
)
def test_disabled_forwarding_fails_for_used_families(value: str | None, needed: bool, level: Level) -> None:
    """IPv6 may be 2, which keeps router advertisements."""
    assert forwarding(Family.IPV6, value, needed).level is level


@pytest.mark.parametrize(
    ("effective", "level"),
    [
        ({}, Level.OK),
        ({"eth0": "1"}, Level.OK),
        ({"eth0": "0", "eth1": "2"}, Level.OK),
        ({"eth0": "1", "eth1": "0"}, Level.WARN),
        ({"eth0": "1", "eth1": "1"}, Level.WARN),
    ],
)
def test_strict_reverse_path_filtering_is_a_warning(effective: dict[str, str], level: Level) -> None:
    """Only on a node with several routes."""
    assert reverse_path(effective).level is level


@pytest.mark.parametrize(
    ("bridges", "pods", "value", "level"),
    [
        ([], "", None, Level.OK),
        ([], "cni0", None, Level.OK),
        (["cni0"], "", "1", Level.OK),
        (["cni0"], "", "0", Level.WARN),
        (["cni0"], "", None, Level.WARN),
        (["cni0", "docker0"], "cni0", None, Level.FAIL),
        (["docker0"], "cni0", None, Level.WARN),
    ],
)
def test_bridges_hidden_from_iptables_are_a_warning(
    bridges: list[str], pods: str, value: str | None, level: Level
) -> None:
    """They fail if the configuration names one as the pods' bridge."""
    assert bridged(Family.IPV4, bridges, pods, value).level is level


def test_bridge_advice_names_module_or_setting() -> None:
    assert "modprobe" in bridged(Family.IPV6, ["cni0"], "", None).advice
    assert "bridge-nf-call-ip6tables = 1" in bridged(Family.IPV6, ["cni0"], "", "0").advice
