"""The clients in the lists of the match `recent`, with real packets and recorded clocks."""

import socket
from pathlib import Path

import pytest

from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.kernel.recent import recent_lines
from pykubeproxy.objects import Family


@pytest.mark.root
def test_lists_a_client_that_has_just_connected(inside: str, runner: Runner) -> None:
    """Its age is some seconds at most."""
    assert runner.run(("ip", "link", "set", "lo", "up")).exit_code == 0
    rules = "*filter\n-A OUTPUT -p udp -d 127.0.0.9/32 -m recent --set --name KUBE-SEP-A --rsource\nCOMMIT\n"
    open_iptables(Backend.NFT, Family.IPV4, runner).restore(rules)
    assert [*recent_lines()] == []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(b"x", ("127.0.0.9", 9))
    (line,) = recent_lines()
    start, _, age = line.partition(" age=")
    assert start == "KUBE-SEP-A: src=127.0.0.1"
    assert 0 <= int(age) < 60


@pytest.mark.parametrize("rate", [100, 250, 300, 1000])
def test_age_follows_from_the_kernels_clock(tmp_path: Path, rate: int) -> None:
    """The kernel counts in its own unit, from 300 s before 32 bits overflow."""
    uptime = 5000
    now = (1 << 32) + (uptime - 300) * rate
    lists = tmp_path / "thread-self/net/xt_recent"
    lists.mkdir(parents=True)
    (lists / "KUBE-SEP-A").write_text(
        f"src=10.0.0.1 ttl: 64 last_seen: {now - 90 * rate} oldest_pkt: 1 {now - 90 * rate}\n"
    )
    assert [*recent_lines(tmp_path)] == ["KUBE-SEP-A: src=10.0.0.1"]
    (tmp_path / "timer_list").write_text(f"cpu: 0\njiffies: {now}\n")
    (tmp_path / "uptime").write_text(f"{uptime}.12 9000.0\n")
    assert [*recent_lines(tmp_path)] == ["KUBE-SEP-A: src=10.0.0.1 age=90"]
