"""Flows, counters, tables of nftables and ipsets, over netlink."""

import errno
import ipaddress
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from pykubeproxy.inspect.flows import Flow, parse_flows
from pykubeproxy.kernel import Backend, Runner, conntrack, leftovers, netlink, nfacct, nftables, open_iptables
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import Count
from tests.fakes import kube_proxy
from tests.kernel.flows import CLIENT, POD, VIP, fill, insert, listed

pytestmark = pytest.mark.root

ENTRIES = 200_000
MEBIBYTE = 1024
# A separate process, to measure its peak memory.
PROGRAM = """
import re, sys, time
from pathlib import Path
from pykubeproxy.kernel import conntrack
from pykubeproxy.objects import Family
from pykubeproxy.services.flows import Flush, StaleFlowFilter, NodePortAddresses, UdpPort
from pykubeproxy.services.ports import PortName

family = Family(sys.argv[1])
cluster_ip, node_port = (bytes((10, 96, 0, 10)), 53), (b"", 30053)
frontends = frozenset({cluster_ip, node_port})
port = UdpPort(frontends, frozenset(), cluster_ip, frozenset(), frozenset())
flush = Flush(family, {PortName("ns", "dns", "", "UDP"): port}, frozenset(), NodePortAddresses())
stale_flows = StaleFlowFilter(flush, lambda _: True)

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before, started = peak(), time.monotonic()
looked = stale = 0
for flow in conntrack.udp_flows(family):
    looked += 1
    stale += stale_flows.is_stale(flow.destination, flow.reply_source)
print(looked, stale, peak() - before, time.monotonic() - started)
"""

TABLES = """
table ip kube-proxy {
    set nodes { type ipv4_addr; }
    chain b { ip daddr @nodes accept; }
    chain a { type nat hook prerouting priority 0; jump b; }
}
table ip6 kube-proxy {
    chain a { type filter hook input priority 0; }
}
table inet kube-proxy { }
table ip kube-proxy-mine { }
table ip nat { }
"""
IMPORTS = """
from pykubeproxy.kernel import conntrack, leftovers, nfacct, nftables
from pykubeproxy.objects import Family
"""


def packed(address: str) -> bytes:
    return ipaddress.ip_address(address).packed


def test_reads_udp_flows(inside: str, runner: Runner, family: Family) -> None:
    """A flow has source, destination and the source of its replies."""
    client, vip, pod = CLIENT[family], VIP[family], POD[family]
    insert(runner, f"{client} 4000", f"{vip} 53", f"{pod} 5353")
    (flow,) = conntrack.udp_flows(family)
    assert flow[:3] == ((packed(client), 4000), (packed(vip), 53), (packed(pod), 5353))


def test_skips_other_protocols_families_and_zones(inside: str, runner: Runner, family: Family) -> None:
    """TCP, SCTP, the other family and other conntrack zones are left out."""
    client, vip, pod = CLIENT[family], VIP[family], POD[family]
    for protocol in ("tcp", "sctp"):
        insert(runner, f"{client} 4000", f"{vip} 53", f"{pod} 53", protocol)
    insert(runner, f"{client} 4001", f"{vip} 53", f"{pod} 53", zone=7)
    assert len(listed(runner, family)) == 3
    (other,) = set(Family) - {family}
    insert(runner, f"{CLIENT[other]} 4000", f"{VIP[other]} 53")
    assert not list(conntrack.udp_flows(family))
    assert len(list(conntrack.udp_flows(other))) == 1


def test_kernel_filters_by_protocol(inside: str, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sends no other protocols, so a table full of TCP costs nothing."""
    seen: list[bytes] = []
    real = netlink.netfilter_dump

    def recorded(*arguments: Any) -> Iterator[bytes]:
        for raw in real(*arguments):
            seen.append(raw)
            yield raw

    monkeypatch.setattr(netlink, "netfilter_dump", recorded)
    insert(runner, "10.1.0.1 4000", "10.96.0.10 53", protocol="tcp")
    insert(runner, "10.1.0.1 4000", "10.96.0.10 53")
    assert len(list(conntrack.udp_flows(Family.IPV4))) == len(seen) == 1


def test_lines_of_flows_say_what_conntrack_prints(inside: str, runner: Runner, family: Family) -> None:
    """For each protocol with ports; another one and another zone are no flows."""
    client, vip, pod = CLIENT[family], VIP[family], POD[family]
    for protocol in ("tcp", "udp", "sctp"):
        insert(runner, f"{client} 4000", f"{vip} 53", f"{pod} 5353", protocol)
    insert(runner, f"{client} 4001", f"{vip} 53", f"{pod} 53", "tcp", zone=7)
    printed = parse_flows("\n".join(listed(runner, family)))
    read = parse_flows("\n".join(conntrack.flow_lines(family)))
    assert len(read) == 3

    def without_timeout(flows: list[Flow]) -> list[Flow]:
        return sorted((structs.replace(flow, timeout=None) for flow in flows), key=str)

    assert without_timeout(read) == without_timeout(printed)
    assert all(590 < flow.timeout <= 600 for flow in read if flow.timeout is not None)
    (tcp,) = parse_flows("\n".join(conntrack.flow_lines(family, "tcp")))
    assert tcp.state == "ESTABLISHED"
    assert len(list(conntrack.flow_lines(family, source=client, destination=vip))) == 3
    assert not [*conntrack.flow_lines(family, source=vip), *conntrack.flow_lines(family, destination=client)]


def test_deletes_only_the_given_flow(inside: str, runner: Runner, family: Family) -> None:
    """A TCP flow between the same addresses and ports stays."""
    client, vip, pod = CLIENT[family], VIP[family], POD[family]
    insert(runner, f"{client} 4000", f"{vip} 53", f"{pod} 53", "tcp")
    for port in (4000, 4001):
        insert(runner, f"{client} {port}", f"{vip} 53", f"{pod} 53")
    (flow,) = (flow for flow in conntrack.udp_flows(family) if flow.source[1] == 4000)
    assert conntrack.delete(flow)
    left = listed(runner, family)
    assert len(left) == 2
    assert not any("udp" in line and "sport=4000" in line for line in left)


def test_deleting_an_ended_flow_is_no_error(inside: str, runner: Runner, family: Family) -> None:
    """A flow may end between being read and being deleted."""
    insert(runner, f"{CLIENT[family]} 4000", f"{VIP[family]} 53", f"{POD[family]} 53")
    (flow,) = conntrack.udp_flows(family)
    assert conntrack.delete(flow)
    assert not conntrack.delete(flow)


def test_never_deletes_the_whole_table(inside: str, runner: Runner, family: Family) -> None:
    """A flow without raw data is rejected: the kernel would delete everything."""
    insert(runner, f"{CLIENT[family]} 4000", f"{VIP[family]} 53")
    (flow,) = conntrack.udp_flows(family)
    with pytest.raises(ValueError, match="udp_flows"):
        conntrack.delete(flow._replace(raw=b""))
    assert len(listed(runner, family)) == 1


def test_deletes_during_a_long_dump(inside: str, runner: Runner) -> None:
    """Every flow is seen and deleted, across several reads."""
    fill(Family.IPV4, 3000)
    assert sum(conntrack.delete(flow) for flow in conntrack.udp_flows(Family.IPV4)) == 3000
    assert not listed(runner, Family.IPV4)


def test_scan_of_200_000_entries_needs_no_memory(inside: str, runner: Runner, family: Family) -> None:
    """No entry counts as stale; the time is printed."""
    started = time.monotonic()
    fill(family, ENTRIES)
    filled = time.monotonic() - started
    outcome = runner.run((sys.executable, "-c", PROGRAM, family.value))
    assert outcome.exit_code == 0, outcome.stderr
    looked, stale, kibibytes, seconds = outcome.stdout.split()
    print(f"{looked} entries: {float(seconds):.2f} s, {kibibytes} KiB more (made in {filled:.1f} s)")
    assert (int(looked), int(stale)) == (ENTRIES, 0)
    assert int(kibibytes) < 20 * MEBIBYTE


def test_creates_a_counter_once(inside: str) -> None:
    """An existing counter is left alone."""
    assert nfacct.read("drops") is None
    assert nfacct.ensure("drops") == nfacct.ensure("drops") == ""
    assert nfacct.read("drops") == Count(0, 0)


def test_counter_keeps_its_count(inside: str, runner: Runner) -> None:
    """Ensuring a counter again does not reset it."""
    assert nfacct.ensure("pings") == ""
    iptables = open_iptables(Backend.NFT, Family.IPV4, runner)
    iptables.restore("*filter\n-A OUTPUT -m nfacct --nfacct-name pings\nCOMMIT\n")
    runner.run(("ip", "link", "set", "lo", "up"))
    sent = (
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'12345', ('127.0.0.1', 9))"
    )
    assert runner.run((sys.executable, "-c", sent)).exit_code == 0
    counted = nfacct.read("pings")
    assert counted
    assert counted.packets >= 1
    assert counted.bytes >= 33
    assert nfacct.ensure("pings") == ""
    assert nfacct.read("pings") == counted


def test_counters_belong_to_the_namespace(inside: str, runner: Runner) -> None:
    """A counter does not exist in another network namespace."""
    assert nfacct.ensure("here") == ""
    snippet = "from pykubeproxy.kernel import nfacct; print(nfacct.read('here'))"
    assert Runner(("unshare", "-n")).run((sys.executable, "-c", snippet)).stdout == "None\n"


def test_invalid_name_is_a_reason(inside: str) -> None:
    """A name that the kernel rejects gives a reason, not an exception."""
    assert "nfnetlink_acct" in nfacct.ensure("x" * 40)


@pytest.fixture
def tables(inside: str, runner: Runner) -> Iterator[Runner]:
    """Both families' tables as a kube-proxy in nftables mode leaves them, and tables of others."""
    assert runner.run(("nft", "-f", "-"), TABLES).exit_code == 0
    yield runner


def present(runner: Runner) -> list[str]:
    return sorted(runner.run(("nft", "list", "tables")).stdout.splitlines())


def test_removes_a_table_with_its_contents(tables: Runner) -> None:
    """Only the table of that family and name; the second time there is none."""
    assert nftables.remove_table(Family.IPV4, "kube-proxy")
    left = ["table inet kube-proxy", "table ip kube-proxy-mine", "table ip nat"]
    assert present(tables) == [*left, "table ip6 kube-proxy"]
    assert nftables.remove_table(Family.IPV6, "kube-proxy")
    assert present(tables) == left
    assert not nftables.remove_table(Family.IPV4, "kube-proxy")


def test_names_and_ports(inside: str) -> None:
    """A set without ports has none, and so has a set that does not exist."""
    assert leftovers.ipset_names() == frozenset()
    kube_proxy.create_ipsets("mine")
    assert leftovers.ipset_names() == {*kube_proxy.SETS, "mine"}
    assert leftovers.ipset_ports("KUBE-NODE-PORT-TCP") == {kube_proxy.NODE_PORT}
    assert leftovers.ipset_ports("mine") == leftovers.ipset_ports("none") == frozenset()


def test_a_set_in_use_is_busy(inside: str, runner: Runner) -> None:
    """Without the rule, it can be destroyed; again does no harm."""
    kube_proxy.create_ipsets()
    iptables = open_iptables(Backend.NFT, Family.IPV4, runner)
    iptables.restore("*filter\n-A INPUT -m set --match-set KUBE-CLUSTER-IP dst,dst -j DROP\nCOMMIT\n")
    with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
        leftovers.destroy_ipset("KUBE-CLUSTER-IP")
    iptables.restore("*filter\n-F INPUT\nCOMMIT\n")
    for _ in range(2):
        leftovers.destroy_ipset("KUBE-CLUSTER-IP")
        assert "KUBE-CLUSTER-IP" not in leftovers.ipset_names()


@pytest.mark.parametrize(
    ("call", "printed"),
    [
        ("list(conntrack.udp_flows(Family.IPV4))", "PermissionError"),
        ("nftables.remove_table(Family.IPV4, 'kube-proxy')", "PermissionError"),
        ("leftovers.ipset_names()", "PermissionError"),
        (
            "print(nfacct.ensure('drops'), nfacct.read('drops'))",
            "cannot create the nfacct counter drops: Operation not permitted; run as root or with CAP_NET_ADMIN None",
        ),
    ],
)
def test_missing_cap_net_admin_is_named(tables: Runner, call: str, printed: str) -> None:
    """A request raises or gives a reason, and changes nothing."""
    limited = Runner((*tables.prefix, "setpriv", "--inh-caps=-all", "--bounding-set=-all"))
    program = f"{IMPORTS}\ntry: {call}\nexcept PermissionError: print('PermissionError')"
    assert limited.run((sys.executable, "-c", program)).stdout == f"{printed}\n"
    assert "table ip kube-proxy" in present(tables)
