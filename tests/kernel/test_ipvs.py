"""Read and remove virtual servers of IPVS."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPVS, IPRoute, IPVSService

from pykubeproxy.kernel import leftovers
from pykubeproxy.kernel.leftovers import VirtualServer
from pykubeproxy.objects import Family
from tests.fakes.kube_proxy import create_interface, create_ipsets

# As Linux 6.1 prints it.
TEXT = """\
IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A600001:01BB rr
  -> 0A000001:192B      Masq    1      0          0
SCTP  0A60000B:0050 rr  persistent 25000 FFFFFFFF
UDP  0A60000A:0035 rr
TCP  [fd00:0096:0000:0000:0000:0000:0000:0001]:0050 rr
  -> [fd00:0000:0000:0000:0000:0000:0000:0002]:0050      Masq    1      0          0
FWM  00000007 rr
"""
CREATED = (
    VirtualServer("TCP", "10.96.0.1", 443),
    VirtualServer("TCP", "192.0.2.1", 30080),
    VirtualServer("TCP", "fd00:96::1", 80),
    VirtualServer("UDP", "10.96.0.10", 53),
)
OF_KEEPALIVED = (VirtualServer("TCP", "192.0.2.1", 80), VirtualServer("UDP", "192.0.2.1", 30080))


@pytest.fixture
def servers(inside: str) -> Iterator[None]:
    """Create virtual servers; skip the test on a kernel without IPVS."""
    if not Path("/proc/thread-self/net/ip_vs").exists():
        pytest.skip("this kernel has no IPVS, or its module ip_vs is not loaded")
    with IPRoute() as route:
        route.link("set", index=1, state="up")
    with IPVS() as client:
        for server in (*CREATED, *OF_KEEPALIVED):
            # pyroute2 writes the prefix length of IPv6, 128, as an address.
            mask = {"netmask": "128.0.0.0"} if server.family is Family.IPV6 else {}
            protocol = getattr(socket, f"IPPROTO_{server.protocol}")
            service = IPVSService(
                addr=server.address, port=server.port, protocol=protocol, sched_name="rr", **mask
            )
            client.service("add", service=service)
    yield


def test_virtual_servers_are_read(tmp_path: Path) -> None:
    """Real servers and firewall marks do not count; without IPVS there are none."""
    assert leftovers.ipvs_servers(tmp_path / "none") == ()
    (tmp_path / "ip_vs").write_text(TEXT)
    found = leftovers.ipvs_servers(tmp_path / "ip_vs")
    assert [str(server) for server in found] == [
        "SCTP 10.96.0.11:80",
        "TCP 10.96.0.1:443",
        "TCP [fd00:96::1]:80",
        "UDP 10.96.0.10:53",
    ]


def test_virtual_servers_of_kube_proxy_have_its_addresses_and_node_ports() -> None:
    """Others belong to other programs, such as keepalived."""
    bound = {"10.96.0.1", "10.96.0.10", "fd00:96::1"}
    node_ports = {(Family.IPV4, "TCP", 30080)}
    assert all(leftovers.is_from_kube_proxy(server, bound, node_ports) for server in CREATED)
    assert not any(leftovers.is_from_kube_proxy(server, bound, node_ports) for server in OF_KEEPALIVED)


def test_ipset_names_fit_the_kernels_limit() -> None:
    """kube-proxy truncates them; IPv6 ones have a prefix of their own."""
    names = leftovers.set_names()
    assert len(names) == 34
    assert max(map(len, names)) == 31
    assert names >= {"KUBE-CLUSTER-IP", "KUBE-6-LOAD-BALANCER-SOURCE-CID", "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS"}


@pytest.mark.root
def test_only_virtual_servers_of_kube_proxy_are_removed(servers: None) -> None:
    """A dry run removes none; a second run has nothing to do."""
    create_interface()
    create_ipsets()
    dry = leftovers.remove_virtual_servers(dry_run=True)
    assert (dry.names, dry.failure) == (tuple(map(str, CREATED)), "")
    assert len(leftovers.ipvs_servers()) == len(CREATED) + len(OF_KEEPALIVED)
    assert leftovers.remove_virtual_servers() == dry
    assert leftovers.ipvs_servers() == OF_KEEPALIVED
    assert leftovers.remove_virtual_servers().names == ()
