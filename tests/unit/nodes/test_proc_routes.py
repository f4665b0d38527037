"""Routes in the text of /proc/net, beside those of netlink."""

import os
import subprocess
from pathlib import Path

import pytest

from pykubeproxy.inspect.packets.packet import NodeRoute
from pykubeproxy.kernel.conntrack import failure_counts, load
from pykubeproxy.kernel.network import routes
from pykubeproxy.lab.network import Namespace
from pykubeproxy.nodes.proc_routes import COMMAND, parse_failures, parse_routes
from pykubeproxy.objects import Family


def test_lines_that_are_no_routes_are_skipped() -> None:
    text = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t0001F40A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "eth0\t0001F40A\t00000000\t0001\t0\t0\t0\tFF00FF00\t0\t0\t0\n"
        "*\t0002F40A\t00000000\t0201\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        f"{'fd' + 30 * '0'} ff {32 * '0'} 00 {32 * '0'} 00000400 00000001 00000000 00000001     eth0\n"
    )
    assert list(parse_routes(text)) == [NodeRoute("10.244.1.0/24", "eth0")]


def test_failures_of_conntrack_are_those_of_all_processors() -> None:
    text = (
        "entries  clashres found new invalid ignore delete chainlength insert insert_failed drop early_drop\n"
        "00000002  00000000 00000000 00000000 0000000a 00000000 00000000 00000000 00000000 00000001 00000000 0\n"
        "00000002  00000000 00000000 00000000 00000006 00000000 00000000 00000000 00000000 00000000 00000003 0\n"
    )
    assert parse_failures(text) == {"invalid": 16, "insert-failed": 1, "drop": 3}
    assert parse_failures("Iface\n") == {}


@pytest.mark.root
def test_failures_of_conntrack_are_those_of_netlink() -> None:
    load()
    assert parse_failures(Path("/proc/net/stat/nf_conntrack").read_text()).keys() == failure_counts().keys()


@pytest.mark.root
def test_routes_are_those_of_netlink() -> None:
    one, other = Namespace(f"tr{os.getpid()}", "one"), Namespace(f"tr{os.getpid()}", "other")
    try:
        one.veth("eth0", other, "eth0")
        for address, length in (("10.0.0.1", 24), ("fd00:10::1", 64)):
            one.address("eth0", address, length)
        one.route("default", via="10.0.0.2")
        one.route("default", via="fd00:10::2")
        one.route("10.244.2.7/32", interface="eth0")
        one.route("10.244.1.0/24", kind="blackhole")
        one.route("fd00:10:244:1::/64", kind="blackhole")
        with one.entered():
            printed = subprocess.run(COMMAND, capture_output=True, text=True, check=True).stdout
            known = {NodeRoute(one.network, one.interface) for family in Family for one in routes(family)}
    finally:
        one.remove()
        other.remove()
    found = {one for one in parse_routes(printed) if one.network != "ff00::/8"}
    # Netlink has multicast addresses in another table, and blackholes of IPv6 behind lo.
    assert found == {one for one in known if one.interface not in ("", "lo")}
    assert NodeRoute("0.0.0.0/0", "eth0") in found
    assert NodeRoute("::/0", "eth0") in found
