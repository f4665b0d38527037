"""Read and watch addresses, interfaces and routes of a network namespace."""

import ipaddress
import queue
import socket
from collections.abc import Callable
from typing import Any

import pytest
from pyroute2 import IPRoute
from pyroute2.netlink.rtnl import rt_type

from pykubeproxy.kernel import KernelError, Runner, local_addresses, netlink, network, watch_addresses
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY
from pykubeproxy.kernel.network import LocalAddress, TableRoute, is_local
from pykubeproxy.objects import Family
from tests.fakes.waiting import PATIENCE

pytestmark = pytest.mark.root


@pytest.fixture
def ip(inside: str, runner: Runner) -> Callable[..., None]:
    """Runs `ip` in the namespace, which has a link eth9."""

    def run(*words: str) -> None:
        outcome = runner.run(("ip", *words))
        assert outcome.exit_code == 0, outcome.stderr

    run("link", "set", "lo", "up")
    run("link", "add", "eth9", "type", "veth", "peer", "name", "far9")
    return run


def test_lists_addresses_by_family(ip: Callable[..., None]) -> None:
    """Each address has its prefix length and interface."""
    ip("addr", "add", "192.168.99.10/24", "dev", "eth9")
    ip("addr", "add", "10.244.1.1/24", "dev", "eth9")
    ip("addr", "add", "fd00:99::10/64", "dev", "eth9", "nodad")
    assert local_addresses(Family.IPV4) == (
        LocalAddress("10.244.1.1", 24, "eth9"),
        LocalAddress("127.0.0.1", 8, "lo"),
        LocalAddress("192.168.99.10", 24, "eth9"),
    )
    assert set(local_addresses(Family.IPV6)) == {
        LocalAddress("::1", 128, "lo"),
        LocalAddress("fd00:99::10", 64, "eth9"),
    }


def test_netlink_failure_is_a_kernel_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the socket and of the kernel become KernelError."""

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", fail)
    with pytest.raises(KernelError, match=r"cannot read the addresses of this node: .*open files"):
        local_addresses(Family.IPV4)


def test_addresses_removed_during_a_dump_hide_no_others(
    ip: Callable[..., None], runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel continues at a position in its list, and says that the list has changed."""
    commands = "".join(f"addr add 10.2.0.{number}/32 dev eth9\n" for number in range(1, 251))
    assert runner.run(("ip", "-batch", "-"), commands).exit_code == 0
    begin, removed = netlink._connection, iter(["10.2.0.1/32", "10.2.0.2/32"])

    def begin_and_remove(*arguments: Any) -> socket.socket:
        connection = begin(*arguments)
        if address := next(removed, ""):
            ip("addr", "del", address, "dev", "eth9")
        return connection

    monkeypatch.setattr(netlink, "_connection", begin_and_remove)
    found = [local.address for local in local_addresses(Family.IPV4)]
    assert sorted(found) == sorted(["127.0.0.1", *(f"10.2.0.{number}" for number in range(3, 251))])


@pytest.mark.parametrize("family", Family)
def test_reads_what_pyroute2_reads(ip: Callable[..., None], family: Family) -> None:
    """Interfaces, addresses and routes are those that pyroute2 returns; a multipath route counts by its first hop."""
    for words in (
        ("link", "add", "br9", "type", "bridge"),
        ("link", "set", "eth9", "up"),
        ("link", "set", "far9", "up"),
        ("addr", "add", "10.2.0.1/24", "dev", "eth9"),
        ("addr", "add", "10.1.1.1", "peer", "10.1.1.2/32", "dev", "eth9"),
        ("addr", "add", "fd00:2::1/64", "dev", "eth9", "nodad"),
        ("route", "add", "default", "via", "10.2.0.9"),
        ("route", "add", "blackhole", "10.9.0.0/16"),
        ("route", "add", "10.3.0.0/16", "nexthop", "via", "10.2.0.7", "nexthop", "via", "10.2.0.8"),
        ("route", "add", "10.4.0.0/16", "dev", "far9", "table", "1000"),
        ("-6", "route", "add", "fd00:3::/64", "via", "fd00:2::9"),
        (
            "-6",
            "route",
            "add",
            "fd00:4::/64",
            "metric",
            "7",
            "nexthop",
            "via",
            "fd00:2::7",
            "nexthop",
            "via",
            "fd00:2::8",
        ),
        ("route", "add", "10.5.0.0/16", "via", "inet6", "fd00:2::9", "dev", "eth9", "metric", "5"),
        ("route", "add", "unreachable", "10.6.0.0/16"),
    ):
        ip(*words)
    of = ADDRESS_FAMILY[family]
    with IPRoute() as route:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in route.get_links()}
        assert [(interface.name, interface.kind) for interface in network.interfaces()] == sorted(
            (link.get_attr("IFLA_IFNAME"), link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") or "")
            for link in route.get_links()
        )
        assert list(local_addresses(family)) == sorted(
            LocalAddress(
                found.get_attr("IFA_LOCAL") or found.get_attr("IFA_ADDRESS"),
                found["prefixlen"],
                names[found["index"]],
            )
            for found in route.get_addr(family=of)
        )
        expected = [
            routed for message in route.get_routes(family=of) for routed in as_read(message, names, family)
        ]
    assert list(network.all_routes(family)) == expected
    in_main = [(routed.network, routed.interface) for routed in expected if routed.table == 254]
    first_hops = [(routed.network, routed.interface) for routed in network.routes(family)]
    assert first_hops == list(dict.fromkeys(in_main))


def as_read(message: Any, names: dict[int, str], family: Family) -> list[TableRoute]:
    """The next hops of a route as pyroute2 decodes it."""
    destination = message.get_attr("RTA_DST") or {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}[family]
    return [
        TableRoute(
            message.get_attr("RTA_TABLE"),
            f"{destination}/{message['dst_len']}",
            rt_type.get(message["type"], str(message["type"])),
            hop.get_attr("RTA_GATEWAY") or (hop.get_attr("RTA_VIA") or {}).get("addr", ""),
            names.get(hop["oif"] if "oif" in hop else hop.get_attr("RTA_OIF"), ""),
            message.get_attr("RTA_PRIORITY") or 0,
        )
        for hop in message.get_attr("RTA_MULTIPATH") or (message,)
    ]


def test_watch_reports_changes_of_both_families(ip: Callable[..., None]) -> None:
    """Each change is reported within a moment."""
    changes: queue.Queue[None] = queue.Queue()
    watch_addresses(lambda: changes.put(None))
    for words in (
        ("addr", "add", "10.2.2.2/24", "dev", "eth9"),
        ("addr", "del", "10.2.2.2/24", "dev", "eth9"),
        ("addr", "add", "fd00::2/64", "dev", "eth9", "nodad"),
    ):
        ip(*words)
        changes.get(timeout=PATIENCE)


def test_watch_ignores_other_namespaces(ip: Callable[..., None]) -> None:
    """Changes in another network namespace are not reported."""
    changes: queue.Queue[None] = queue.Queue()
    watch_addresses(lambda: changes.put(None))
    elsewhere = Runner(("unshare", "-n"))
    assert elsewhere.run(("sh", "-c", "ip link set lo up && ip addr add 10.9.9.9/8 dev lo")).exit_code == 0
    assert changes.empty()


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
    assert {address: is_local(ipaddress.ip_address(address).packed) for address in expected} == expected
