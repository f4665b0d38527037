"""The agent notices rules of nftables that stop packets to Services, and when they no longer do."""

import socket
from collections.abc import Mapping

import pytest

from pykubeproxy.agent.firewalls import FirewallWatch, check_firewalls
from pykubeproxy.kernel import Backend, Runner, nftables, open_iptables
from pykubeproxy.objects import Family
from tests.cases import as_restore_input
from tests.fakes.recorder import FakeRecorder

pytestmark = pytest.mark.root

WHERE = "chain forward of nftables table inet fw"
# Seconds of the watch's clock after which everything is checked again.
LATER = 10_000.0


class Watched:
    """A watch of this network namespace on a node with kube-proxy's rules of a case; it counts its checks."""

    def __init__(self, runner: Runner, backend: Backend) -> None:
        open_iptables(backend, Family.IPV4, runner).restore(as_restore_input("nodeport", Family.IPV4))
        self._run, self._backend = runner.run, backend
        self.recorder, self.numbers, self.checks = FakeRecorder(), [0], 0
        self.synced, self._now = 1.0, LATER
        self._watch = FirewallWatch(self._check, lambda: self.synced, self.recorder, self.numbers.append)

    def _check(self) -> Mapping[str, str]:
        self.checks += 1
        return check_firewalls(self._backend)

    def nft(self, text: str) -> None:
        ended = self._run(("nft", text))
        assert ended.exit_code == 0, ended.stderr

    def firewall(self, policy: str, *rules: str) -> None:
        """Replace the table by one whose chain `forward` has these rules."""
        body = "; ".join((f"type filter hook forward priority 10; policy {policy}", *rules, ""))
        self.nft(f"table inet fw; delete table inet fw; table inet fw {{ chain forward {{ {body} }}; }}")

    def look(self) -> int:
        """Let the watch look after all pauses; return the number of rules that stop packets."""
        self._now += LATER
        self._watch.look(self._now)
        return self.numbers[-1]


@pytest.fixture
def watched(inside: str, runner: Runner, backend: Backend) -> Watched:
    return Watched(runner, backend)


def test_a_policy_is_reported_until_it_is_gone(watched: Watched) -> None:
    assert watched.look() == 0
    watched.firewall("drop", "ct state established,related accept", "tcp dport 22 accept")
    assert watched.look() == 1
    watched.nft("delete table inet fw")
    assert watched.look() == 0
    stops, passes = watched.recorder.events
    assert (stops.kind, stops.type, stops.reason) == ("Node", "Warning", "FirewallStopsServices")
    assert stops.note == f"{WHERE} drops packets to default/kubernetes:https and ns1/web:http: policy DROP"
    assert (passes.type, passes.reason) == ("Normal", "FirewallPassesServices")
    assert watched.checks == 1


def test_a_rule_is_reported_by_its_text(watched: Watched) -> None:
    watched.firewall("accept", "tcp dport 8080 counter drop")
    assert watched.look() == 1
    (event,) = watched.recorder.events
    assert event.note.startswith(f"{WHERE} drops packets to ns1/web:http: tcp dport 8080 counter")


def test_a_policy_behind_a_rule_for_translated_connections_is_harmless(watched: Watched) -> None:
    """As in firewalld."""
    watched.firewall("drop", "ct status dnat accept")
    assert watched.look() == 0
    assert (watched.checks, watched.recorder.events) == (1, [])


def test_nothing_is_checked_without_a_change(watched: Watched) -> None:
    watched.firewall("drop")
    watched.look()
    watched.look()
    assert watched.checks == 1
    watched.synced += 1
    watched.look()
    assert watched.checks == 2
    assert watched.recorder.reasons == ["FirewallStopsServices"]


@pytest.mark.parametrize(
    "change",
    [
        "add rule inet fw forward udp dport 53 accept",
        "replace rule inet fw forward handle {handle} tcp dport 23 accept",
        "delete rule inet fw forward handle {handle}",
        "chain inet fw forward {{ policy drop; }}",
        "delete chain inet fw forward",
        "add table inet other",
    ],
)
def test_each_change_of_a_table_changes_its_layout(watched: Watched, runner: Runner, change: str) -> None:
    watched.firewall("accept", "tcp dport 22 counter accept")
    before = nftables.layout(nftables.native_tables())
    listed = runner.run(("nft", "-a", "list", "table", "inet", "fw")).stdout
    (handle,) = [line.rsplit(" ", 1)[1] for line in listed.splitlines() if "counter" in line]
    if "delete chain" in change:
        watched.nft("flush chain inet fw forward")
    watched.nft(change.format(handle=handle))
    assert nftables.layout(nftables.native_tables()) != before


def test_packets_do_not_change_a_layout(watched: Watched, runner: Runner) -> None:
    rules = "counter; limit rate 1/second; quota 1 mbytes"
    watched.nft("add table inet fw; add chain inet fw out { type filter hook output priority 0; }")
    for rule in rules.split("; "):
        watched.nft(f"add rule inet fw out {rule}")
    before, listed = nftables.layout(["inet fw"]), runner.run(("nft", "list", "table", "inet", "fw"))
    runner.run(("ip", "link", "set", "lo", "up"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"", ("127.0.0.1", 9))
    assert runner.run(("nft", "list", "table", "inet", "fw")).stdout != listed.stdout
    assert nftables.layout(["inet fw"]) == before


def test_a_table_that_is_loaded_again_has_another_layout(watched: Watched) -> None:
    """Its chains and rules have the same handles as before."""
    watched.firewall("accept", "tcp dport 22 accept")
    before = nftables.layout(nftables.native_tables())
    assert nftables.layout(nftables.native_tables()) == before
    watched.firewall("accept", "tcp dport 23 accept")
    assert nftables.layout(nftables.native_tables()) != before
