"""Probes end as the kernel of a namespace makes them end, and leave nothing behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pykubeproxy.kernel import KernelError, conntrack, nftables, probes
from pykubeproxy.kernel.hits import HitTrace
from pykubeproxy.kernel.network import namespace_of_pod
from pykubeproxy.kernel.probes import Probe, ProbeOutcome, ProbeRequest
from pykubeproxy.kernel.system import run_in_new_namespace
from pykubeproxy.objects import Protocol
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

HERE = "192.0.2.1"
OPEN, CLOSED, REJECTED, DROPPED, FORBIDDEN = 8080, 8081, 8082, 8083, 8084
RULES = f"""
table inet t {{
  chain input {{
    type filter hook input priority 0;
    ct state new
    meta l4proto {{ tcp, udp }} th dport {REJECTED} reject with icmp type admin-prohibited
    meta l4proto {{ tcp, udp }} th dport {DROPPED} drop
  }}
  chain output {{
    type filter hook output priority 0;
    udp dport {FORBIDDEN} drop
  }}
}}
"""


@pytest.fixture
def server(inside: str) -> Iterator[str]:
    """A namespace with a TCP and a UDP server on one port; others are closed, rejected or dropped."""
    for command in (("ip", "link", "set", "lo", "up"), ("ip", "addr", "add", f"{HERE}/32", "dev", "lo")):
        subprocess.run(command, check=True)
    subprocess.run(("nft", "-f", "-"), input=RULES, text=True, check=True)
    with socket.create_server((HERE, OPEN)), socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.bind((HERE, OPEN))
        yield inside


def request(port: int, protocol: Protocol = Protocol.TCP, count: int = 2) -> ProbeRequest:
    return ProbeRequest(protocol, HERE, HERE, port, count, b"", 0.3)


def sent(port: int, protocol: Protocol = Protocol.TCP) -> tuple[Probe, ...]:
    with probes.opened(request(port, protocol)) as sender:
        return sender.send()


@pytest.mark.parametrize(
    ("protocol", "port", "outcome", "icmp"),
    [
        (Protocol.TCP, OPEN, ProbeOutcome.CONNECTED, None),
        (Protocol.TCP, CLOSED, ProbeOutcome.REFUSED, None),
        (Protocol.TCP, REJECTED, ProbeOutcome.UNREACHABLE, (3, 13)),
        (Protocol.TCP, DROPPED, ProbeOutcome.TIMED_OUT, None),
        (Protocol.UDP, OPEN, ProbeOutcome.UNANSWERED, None),
        (Protocol.UDP, CLOSED, ProbeOutcome.UNREACHABLE, (3, 3)),
        (Protocol.UDP, REJECTED, ProbeOutcome.UNREACHABLE, (3, 13)),
        (Protocol.UDP, FORBIDDEN, ProbeOutcome.NOT_SENT, None),
    ],
)
def test_result_of_a_probe_is_what_the_kernel_says(
    server: str, protocol: Protocol, port: int, outcome: ProbeOutcome, icmp: tuple[int, int] | None
) -> None:
    for probe in sent(port, protocol):
        assert (probe.outcome, probe.icmp and (probe.icmp.type, probe.icmp.code)) == (outcome, icmp)
        assert probe.icmp is None or probe.icmp.sender == HERE


@pytest.mark.parametrize(("passing", "lost"), [(65535, 0), (500, 552), (52, 53)])
def test_data_that_is_not_acknowledged_names_the_size_of_its_packet(
    server: str, passing: int, lost: int
) -> None:
    rule = f"tcp dport {OPEN} tcp flags & (syn | psh) == psh meta length > {passing} drop"
    subprocess.run(("nft", "add", "rule", "inet", "t", "input", rule), check=True)
    wanted = msgspec.structs.replace(request(OPEN), size=501)
    with probes.opened(wanted) as sender:
        assert [probe.lost_size for probe in sender.send()] == [lost] * 2


def test_udp_with_an_answer_is_replied(server: str) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as echo:
        echo.bind((HERE, CLOSED))
        echo.settimeout(5)
        with probes.opened(request(CLOSED, Protocol.UDP, 1)) as sender:
            # The answer waits for the probe: UDP sockets may receive before they send.
            echo.sendto(b"!", (HERE, sender.flows[0].source_port))
            assert sender.send()[0].outcome is ProbeOutcome.REPLIED


def test_probes_are_sent_from_another_namespace_without_rights(server: str) -> None:
    def from_elsewhere() -> tuple[str, ProbeOutcome]:
        with probes.opened(request(OPEN), f"/run/netns/{server}") as sender:
            return Path(f"/proc/{sender.pid}/status").read_text(), sender.send()[0].outcome

    status, outcome = run_in_new_namespace(from_elsewhere)
    assert "CapEff:\t0000000000000000\n" in status
    assert "NoNewPrivs:\t1\n" in status
    assert outcome is ProbeOutcome.CONNECTED


@pytest.mark.parametrize(("port", "state"), [(OPEN, " ESTABLISHED "), (CLOSED, " "), (DROPPED, " SYN_SENT ")])
def test_entries_of_probes_are_seen_even_if_they_end_at_once(server: str, port: int, state: str) -> None:
    with probes.opened(request(port)) as sender:
        watch = conntrack.FlowWatch(sender.flows)
        sender.send()
        lines = [line for line, _ in watch.end()]
    assert not watch.lost
    for line, flow in zip(lines, sender.flows, strict=True):
        assert state in line
        assert f"sport={flow.source_port} dport={port} " in line


def test_packets_that_are_dropped_before_they_leave_have_no_entry(server: str) -> None:
    rule = f"insert rule inet t output tcp dport {OPEN} drop"
    subprocess.run(("nft", rule), check=True)
    with probes.opened(request(OPEN)) as sender:
        watch = conntrack.FlowWatch(sender.flows)
        sender.send()
    assert [line for line, _ in watch.end()] == ["", ""]


@pytest.mark.parametrize(("port", "verdict"), [(OPEN, "accept"), (DROPPED, "drop")])
def test_kernel_traces_the_rules_that_probes_meet(server: str, port: int, verdict: str) -> None:
    with probes.opened(request(port)) as sender:
        traced = HitTrace(sender.flows)
        sender.send()
        hits = traced.end()
    last = {hit.source_port: hit for hit in hits if (hit.table, hit.chain) == ("inet t", "input")}
    assert {one: hit.verdict for one, hit in last.items()} == dict.fromkeys(
        (flow.source_port for flow in sender.flows), verdict
    )
    assert all("drop" in hit.rule for hit in last.values()) == (verdict == "drop")
    eventually(lambda: nftables.native_tables() == ("inet t",))


def test_deleted_flow_is_gone(server: str) -> None:
    with probes.opened(request(OPEN, count=1)) as sender:
        sender.send()
        (flow,) = sender.flows
        assert flow.delete()
        assert not flow.delete()


@pytest.mark.parametrize("port", [OPEN, DROPPED])
@pytest.mark.parametrize("killed", [False, True])
def test_no_flow_stays_when_the_sender_has_ended(server: str, port: int, killed: bool) -> None:
    with probes.opened(request(port)) as sender:
        if killed:
            sending = threading.Timer(0.1, os.kill, (sender.pid, signal.SIGKILL))
            sending.start()
        with contextlib.suppress(KernelError):
            sender.send()
        if killed:
            sending.join()
            eventually(lambda: not any(flow.delete() for flow in sender.flows))
    assert not any(flow.delete() for flow in sender.flows)


def test_sender_ends_with_its_caller(server: str) -> None:
    with pytest.raises(RuntimeError), probes.opened(request(DROPPED)) as sender:
        raise RuntimeError
    eventually(lambda: not Path(f"/proc/{sender.pid}").exists())


def test_sender_ends_silently_if_its_caller_ends_before_the_request() -> None:
    command = [sys.executable, "-m", probes.__name__, "-1"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_address_that_the_namespace_lacks_is_an_error(server: str) -> None:
    lacking = probes.opened(ProbeRequest(Protocol.TCP, "192.0.2.9", HERE, OPEN))
    with pytest.raises(KernelError, match="Cannot assign requested address"), lacking:
        pass


def test_a_kernel_without_sctp_says_so(server: str) -> None:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132).close()
    except OSError:
        with (
            pytest.raises(KernelError, match="this kernel has no SCTP sockets; load the module sctp"),
            probes.opened(request(OPEN, Protocol.SCTP)),
        ):
            pass
    else:
        pytest.skip("this kernel has SCTP sockets")


def test_namespace_of_a_pod_is_found_by_its_address(server: str) -> None:
    with pytest.raises(KernelError, match="no network namespace"):
        namespace_of_pod("192.0.2.77")
    pod = subprocess.Popen(
        (
            "unshare",
            "-n",
            "sh",
            "-c",
            "ip link set lo up; ip addr add 192.0.2.77/32 dev lo; echo; exec sleep 60",
        ),
        stdout=subprocess.PIPE,
    )
    try:
        assert pod.stdout is not None
        pod.stdout.readline()
        pod.stdout.close()
        assert Path(namespace_of_pod("192.0.2.77")).samefile(f"/proc/{pod.pid}/ns/net")
    finally:
        pod.kill()
        pod.wait()
