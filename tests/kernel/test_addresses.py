"""Read and watch the addresses of a network namespace."""

import queue
import socket
from typing import Any

import pytest
from pyroute2 import IPRoute

from pykubeproxy.kernel import KernelError, Runner, local_addresses, netlink, rtnetlink, watch_addresses
from pykubeproxy.kernel.addresses import LocalAddress
from pykubeproxy.kernel.netlink import ADDRESS_FAMILY
from pykubeproxy.objects import Family

pytestmark = pytest.mark.root


@pytest.fixture
def ip(inside: str, runner: Runner):
    """Runs `ip` in the namespace, which has a link eth9."""

    def run(*words: str) -> None:
        outcome = runner.run(("ip", *words))
        assert outcome.exit_code == 0, outcome.stderr

    run("link", "set", "lo", "up")
    run("link", "add", "eth9", "type", "veth", "peer", "name", "far9")
    return run


def test_lists_addresses_by_family(ip) -> None:
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


def test_point_to_point_link_gives_the_local_address(ip) -> None:
    """The peer's address is not listed."""
    ip("addr", "add", "10.1.1.1", "peer", "10.1.1.2/32", "dev", "eth9")
    assert LocalAddress("10.1.1.1", 32, "eth9") in local_addresses(Family.IPV4)


def test_netlink_failure_is_a_kernel_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the socket and of the kernel become KernelError."""

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socket", fail)
    with pytest.raises(KernelError, match=r"cannot read the addresses of this node: .*open files"):
        local_addresses(Family.IPV4)


def test_addresses_removed_during_a_dump_hide_no_others(
    ip, runner: Runner, monkeypatch: pytest.MonkeyPatch
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
    found = [it.address for it in rtnetlink.addresses(socket.AF_INET)]
    assert sorted(found) == sorted(["127.0.0.1", *(f"10.2.0.{number}" for number in range(3, 251))])


@pytest.mark.parametrize("family", Family)
def test_reads_what_pyroute2_reads(ip, family: Family) -> None:
    """Interfaces, addresses and routes are those that pyroute2 returns, in the same order."""
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
    ):
        ip(*words)
    of = ADDRESS_FAMILY[family]
    with IPRoute() as route:
        assert [(it.interface, it.name, it.kind) for it in rtnetlink.links()] == [
            (
                it["index"],
                it.get_attr("IFLA_IFNAME"),
                it.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") or "",
            )
            for it in route.get_links()
        ]
        assert [tuple(it) for it in rtnetlink.addresses(of)] == [
            (it.get_attr("IFA_LOCAL") or it.get_attr("IFA_ADDRESS"), it["prefixlen"], it["index"])
            for it in route.get_addr(family=of)
        ]
        assert [tuple(it) for it in rtnetlink.routes(of)] == [
            (
                it.get_attr("RTA_DST") or "",
                it["dst_len"],
                it.get_attr("RTA_OIF") or next((hop["oif"] for hop in it.get_attr("RTA_MULTIPATH") or ()), 0),
                it.get_attr("RTA_TABLE"),
            )
            for it in route.get_routes(family=of)
        ]


def test_watch_reports_changes_of_both_families(ip) -> None:
    """Each change is reported within a moment."""
    changes: queue.Queue[None] = queue.Queue()
    watch_addresses(lambda: changes.put(None))
    for words in (
        ("addr", "add", "10.2.2.2/24", "dev", "eth9"),
        ("addr", "del", "10.2.2.2/24", "dev", "eth9"),
        ("addr", "add", "fd00::2/64", "dev", "eth9", "nodad"),
    ):
        ip(*words)
        changes.get(timeout=5)


def test_watch_ignores_other_namespaces(ip) -> None:
    """Changes in another network namespace are not reported."""
    changes: queue.Queue[None] = queue.Queue()
    watch_addresses(lambda: changes.put(None))
    elsewhere = Runner(("unshare", "-n"))
    assert elsewhere.run(("sh", "-c", "ip link set lo up && ip addr add 10.9.9.9/8 dev lo")).exit_code == 0
    assert changes.empty()
