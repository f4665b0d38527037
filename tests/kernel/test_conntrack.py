"""The table of connections: what is read of it, and what is deleted."""

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
    """A UDP flow is read with both ends, and with who answers."""
    client, vip, pod = CLIENT[family], VIP[family], POD[family]
    insert(runner, f"{client} 4000", f"{vip} 53", f"{pod} 5353")
    (flow,) = conntrack.udp_flows(family)
    assert flow[:3] == ((packed(client), 4000), (packed(vip), 53), (packed(pod), 5353))


def test_other_protocols_families_and_zones_are_left_out(inside: str, runner: Runner, family: Family) -> None:
    """TCP, SCTP and the other family's flows are not among them, nor what is in another conntrack zone."""
    client, vip, pod = CLIENT[family], VIP[family], POD[family]
    for protocol in ("tcp", "sctp"):
        insert(runner, f"{client} 4000", f"{vip} 53", f"{pod} 53", protocol)
    insert(runner, f"{client} 4001", f"{vip} 53", f"{pod} 53", zone=7)
    assert len(listed(runner, family)) == 3
    (other,) = set(Family) - {family}
    insert(runner, f"{CLIENT[other]} 4000", f"{VIP[other]} 53")
    assert not list(conntrack.udp_flows(family))
    assert len(list(conntrack.udp_flows(other))) == 1


def test_the_kernel_filters(inside: str, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself leaves out other protocols, so a table full of TCP costs nothing here."""
    seen: list[bytes] = []
    real = conntrack.netfilter.dump
    monkeypatch.setattr(
        conntrack.netfilter, "dump", lambda *args: (seen.append(raw) or raw for raw in real(*args))
    )
    insert(runner, "10.1.0.1 4000", "10.96.0.10 53", protocol="tcp")
    insert(runner, "10.1.0.1 4000", "10.96.0.10 53")
    assert len(list(conntrack.udp_flows(Family.IPV4))) == len(seen) == 1


def test_deletes_one(inside: str, runner: Runner, family: Family) -> None:
    """Only the flow that is meant is deleted, not even that of the same ends under another protocol."""
    client, vip, pod = CLIENT[family], VIP[family], POD[family]
    insert(runner, f"{client} 4000", f"{vip} 53", f"{pod} 53", "tcp")
    for port in (4000, 4001):
        insert(runner, f"{client} {port}", f"{vip} 53", f"{pod} 53")
    (flow,) = (it for it in conntrack.udp_flows(family) if it.source[1] == 4000)
    assert conntrack.delete(flow)
    left = listed(runner, family)
    assert len(left) == 2
    assert not any("udp" in line and "sport=4000" in line for line in left)


def test_deletes_what_went_already(inside: str, runner: Runner, family: Family) -> None:
    """A flow that ended between being read and being deleted is no error."""
    insert(runner, f"{CLIENT[family]} 4000", f"{VIP[family]} 53", f"{POD[family]} 53")
    (flow,) = conntrack.udp_flows(family)
    assert conntrack.delete(flow)
    assert not conntrack.delete(flow)


def test_never_empties_the_table(inside: str, runner: Runner, family: Family) -> None:
    """A flow that was not read from the table is refused: the kernel would take the request for "delete all"."""
    insert(runner, f"{CLIENT[family]} 4000", f"{VIP[family]} 53")
    (flow,) = conntrack.udp_flows(family)
    with pytest.raises(ValueError, match="udp_flows"):
        conntrack.delete(flow._replace(raw=b""))
    assert len(listed(runner, family)) == 1


def test_many_reads_and_deletions_between(inside: str, runner: Runner) -> None:
    """Entries may be deleted while the table is read: each is seen and gone afterwards, however many reads it takes."""
    fill(Family.IPV4, 3000)
    assert sum(conntrack.delete(flow) for flow in conntrack.udp_flows(Family.IPV4)) == 3000
    assert not listed(runner, Family.IPV4)


def test_not_permitted(runner: Runner) -> None:
    """Without CAP_NET_ADMIN reading is an error that says so."""
    limited = Runner((*runner.prefix, "setpriv", "--inh-caps=-all", "--bounding-set=-all"))
    snippet = (
        "from pykubeproxy.kernel import conntrack; from pykubeproxy.objects import Family\n"
        "try: list(conntrack.udp_flows(Family.IPV4))\n"
        "except PermissionError as error: print(error.strerror)"
    )
    assert limited.run((sys.executable, "-c", snippet)).stdout == "Operation not permitted\n"
