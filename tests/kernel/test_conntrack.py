"""Read and delete conntrack entries."""

import ipaddress
import sys

import pytest

from pykubeproxy.kernel import Runner, conntrack
from pykubeproxy.objects import Family
from tests.kernel.flows import CLIENT, POD, VIP, fill, insert, listed

pytestmark = pytest.mark.root


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
    real = conntrack.netfilter.dump
    monkeypatch.setattr(
        conntrack.netfilter, "dump", lambda *args: (seen.append(raw) or raw for raw in real(*args))
    )
    insert(runner, "10.1.0.1 4000", "10.96.0.10 53", protocol="tcp")
    insert(runner, "10.1.0.1 4000", "10.96.0.10 53")
    assert len(list(conntrack.udp_flows(Family.IPV4))) == len(seen) == 1


def test_deletes_only_the_given_flow(inside: str, runner: Runner, family: Family) -> None:
    """A TCP flow between the same addresses and ports stays."""
    client, vip, pod = CLIENT[family], VIP[family], POD[family]
    insert(runner, f"{client} 4000", f"{vip} 53", f"{pod} 53", "tcp")
    for port in (4000, 4001):
        insert(runner, f"{client} {port}", f"{vip} 53", f"{pod} 53")
    (flow,) = (it for it in conntrack.udp_flows(family) if it.source[1] == 4000)
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


def test_reading_needs_cap_net_admin(runner: Runner) -> None:
    """Without CAP_NET_ADMIN, reading raises PermissionError."""
    limited = Runner((*runner.prefix, "setpriv", "--inh-caps=-all", "--bounding-set=-all"))
    snippet = (
        "from pykubeproxy.kernel import conntrack; from pykubeproxy.objects import Family\n"
        "try: list(conntrack.udp_flows(Family.IPV4))\n"
        "except PermissionError as error: print(error.strerror)"
    )
    assert limited.run((sys.executable, "-c", snippet)).stdout == "Operation not permitted\n"
