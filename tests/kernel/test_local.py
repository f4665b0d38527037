"""Look up local addresses in the routing tables."""

import ipaddress

import pytest

from pykubeproxy.kernel import Runner
from pykubeproxy.kernel.rtnetlink import is_local

pytestmark = pytest.mark.root


def test_local_addresses_by_routing(inside: str, runner: Runner) -> None:
    """Interface addresses, the loopback range and local routes are local; nothing else is."""
    for command in (
        "ip link set lo up",
        "ip link add eth0 type veth peer eth1",
        "ip address add 192.168.7.1/24 dev eth0",
        "ip address add fd07::1/64 dev eth0 nodad",
        "ip link set eth0 up",
        "ip link set eth1 up",
        "ip route add local 10.9.0.0/16 dev lo",
        "ip route add default via 192.168.7.254",
    ):
        assert runner.run(command.split()).exit_code == 0, command
    expected = {
        "192.168.7.1": True,
        "127.0.0.1": True,
        "127.5.5.5": True,
        "10.9.1.2": True,
        "::1": True,
        "fd07::1": True,
        "192.168.7.2": False,
        "192.168.7.255": False,
        "8.8.8.8": False,
        "fd07::2": False,
        "fd08::1": False,
        "224.0.0.1": False,
    }
    assert {it: is_local(ipaddress.ip_address(it).packed) for it in expected} == expected
