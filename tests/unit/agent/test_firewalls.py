"""When the agent checks firewalls, and what it reports."""

from collections.abc import Iterator, Mapping
from unittest import mock

import pytest

from pykubeproxy.agent import firewalls
from pykubeproxy.agent.firewalls import FirewallWatch
from tests.fakes.recorder import FakeRecorder

WEB = {
    "chain a of nftables table inet fw: drop": "chain a of nftables table inet fw drops packets to ns/web: drop"
}
DNS = {
    "chain b of nftables table inet fw: drop": "chain b of nftables table inet fw drops packets to ns/dns: drop"
}


class Node:
    """A node with a watch: its tables, and what a check answers. `checked` has the times of the checks."""

    def __init__(self) -> None:
        self.tables = ["inet fw"]
        self.layout, self.generation, self.synced = b"1", 1, 1.0
        self.answer: Mapping[str, str] | Exception = {}
        self.checked: list[float] = []
        self.now = 0.0
        self.recorder, self.numbers = FakeRecorder(), [0]
        self.watch = FirewallWatch(self._check, lambda: self.synced, self.recorder, self.numbers.append)

    def _check(self) -> Mapping[str, str]:
        self.checked.append(self.now)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def wait(self, seconds: float) -> None:
        """Let the watch look about every period for this long."""
        for _ in range(int(seconds / 20)):
            self.now += 20
            self.watch.look(self.now)

    def change(self, layout: bytes = b"", answer: Mapping[str, str] | Exception | None = None) -> None:
        """Write other rules; without a layout, such as those of Services."""
        self.generation += 1
        self.layout = layout or self.layout
        self.answer = self.answer if answer is None else answer


@pytest.fixture
def node() -> Iterator[Node]:
    there = Node()
    with (
        mock.patch.object(firewalls.nftables, "native_tables", lambda: tuple(there.tables)),
        mock.patch.object(firewalls.nftables, "layout", lambda tables: there.layout),
        mock.patch.object(firewalls.nftables, "generation", lambda: there.generation),
        mock.patch.object(firewalls.time, "monotonic", lambda: there.now),
    ):
        yield there


def test_tables_are_checked_after_the_first_sync(node: Node) -> None:
    node.synced = 0.0
    node.wait(100)
    assert node.checked == []
    node.synced = 1.0
    node.wait(20)
    assert node.checked == [120]


def test_without_foreign_tables_nothing_is_checked(node: Node) -> None:
    """The tables of kube-proxy are none."""
    node.tables = ["ip kube-proxy"]
    node.wait(2000)
    node.change(b"2")
    node.wait(2000)
    assert node.checked == []


def test_a_changed_table_is_checked_at_most_once_a_minute(node: Node) -> None:
    node.wait(20)
    for number in range(2, 12):
        node.change(b"%d" % number)
        node.wait(20)
    assert node.checked == [20, 80, 140, 200]


def test_other_changes_are_checked_within_ten_minutes(node: Node) -> None:
    node.wait(20)
    node.change()
    node.wait(560)
    assert node.checked == [20]
    node.wait(60)
    assert node.checked == [20, 620]
    node.synced = 2.0  # on legacy, a sync makes no generation
    node.wait(1200)
    assert node.checked == [20, 620, 1220]


def test_each_rule_is_reported_once_and_its_end_too(node: Node) -> None:
    node.answer = WEB
    node.wait(20)
    node.change(b"2", WEB | DNS)
    node.wait(100)
    node.change(b"3", DNS)
    node.wait(100)
    node.change(b"4", {})
    node.wait(100)
    assert node.numbers[::5] and set(node.numbers) == {0, 1, 2} and node.numbers[-1] == 0
    assert [event.note for event in node.recorder.events] == [
        *WEB.values(),
        *DNS.values(),
        "nftables lets packets to Services pass on node node1 again",
    ]


def test_without_tables_nothing_stops_packets(node: Node) -> None:
    node.answer = WEB
    node.wait(20)
    node.change(b"2")
    node.tables = []
    node.wait(80)
    assert (node.checked, node.numbers[-1]) == ([20], 0)
    assert node.recorder.reasons == ["FirewallStopsServices", "FirewallPassesServices"]


def test_a_failed_check_keeps_the_answer_and_is_tried_again(node: Node) -> None:
    node.answer = WEB
    node.wait(20)
    node.change(b"2", ValueError("nft is not installed"))
    node.wait(80)
    assert (node.checked, node.numbers[-1]) == ([20, 80], 1)
    node.answer = {}
    node.wait(600)
    assert (node.checked, node.numbers[-1]) == ([20, 80, 680], 0)


def test_a_kernel_without_nftables_is_left_alone(node: Node) -> None:
    with mock.patch.object(firewalls.nftables, "generation", mock.Mock(side_effect=OSError)):
        node.wait(100)
    assert node.checked == []
