"""The log of invalid values and objects."""

from typing import Any

import msgspec
from structlog.testing import capture_logs

from pykubeproxy.objects import Deleted, Key, Kind, Node, Updated
from pykubeproxy.sources import wire
from pykubeproxy.sources.tracker import ObjectTracker


def node(version: int, *addresses: str) -> msgspec.Raw:
    """Return a version of Node node1 with these internal addresses; every version has another heartbeat."""
    return msgspec.Raw(
        msgspec.json.encode(
            {
                "metadata": {"name": "node1", "resourceVersion": str(version)},
                "status": {
                    "addresses": [{"type": "InternalIP", "address": address} for address in addresses],
                    "conditions": [{"type": "Ready", "lastHeartbeatTime": str(version)}],
                },
            }
        )
    )


def test_commas_count_outside_of_strings_only() -> None:
    """A short value takes many times more memory than its text; a long string does not."""
    meta = {"name": "a", "namespace": "ns", "resourceVersion": "1", "note": 'x\\",' * 300_000}
    whole: dict[str, Any] = {"metadata": meta, "spec": {"externalName": "," * 600_000, "x": [0] * 500_000}}
    tracker, key = ObjectTracker(Kind.SERVICE), Key("ns", "a")
    with capture_logs() as lines:
        assert isinstance(tracker.updated(msgspec.Raw(msgspec.json.encode(whole)), key), Updated)
        whole["spec"]["x"] = [0] * 600_000
        event = tracker.updated(msgspec.Raw(msgspec.json.encode(whole)), key)
    assert event == Deleted(Kind.SERVICE, key, "it has more than 524288 values")
    assert [line["reason"] for line in lines] == ["Service ns/a is skipped: it has more than 524288 values"]


def test_an_object_that_is_too_large_is_reported_once_per_version() -> None:
    """In a list and in a watch, whether it was served before or not."""
    beginning = wire.Truncated(b'{"metadata":{"name":"a","namespace":"ns","resourceVersion":"%d","x":"')
    tracker, key = ObjectTracker(Kind.ENDPOINT_SLICE), Key("ns", "a")
    skipped = Deleted(Kind.ENDPOINT_SLICE, key, "it has more than 16 MiB")
    with capture_logs() as lines:
        for expected in ([skipped], []):
            rejected: dict[Key, str] = {}
            assert not [*tracker.decode_page([wire.Truncated(beginning % 5)], rejected)]
            assert rejected == {key: "5"}
            tracker.listed((), rejected)
            assert [*tracker.too_large()] == expected
        assert tracker.updated(wire.Truncated(beginning % 5), key) is None
        assert tracker.updated(wire.Truncated(beginning % 6), key) == skipped
        assert tracker.deleted(key) is None
    assert len(lines) == 2


def test_a_list_that_fails_reports_no_other_object() -> None:
    """It found an object too large; the next list finds that object smaller."""
    too_large = wire.Truncated(b'{"metadata":{"name":"node2","resourceVersion":"5","x":"')
    tracker, key = ObjectTracker(Kind.NODE), Key("", "node1")
    assert isinstance(tracker.updated(node(4, "192.168.99.10"), key), Updated)
    assert not [*tracker.decode_page([too_large], {})]
    broken = msgspec.Raw(b'{"metadata": {"name": "node1", "resourceVersion": "6"}, "status": 1}')
    assert tracker.updated(broken, key) == Deleted(Kind.NODE, key)
    tracker.listed((), {})
    assert not [*tracker.too_large()]


def test_an_invalid_node_address_is_logged_once() -> None:
    """Not with every heartbeat, nor with every list; again once it has changed."""
    tracker = ObjectTracker(Kind.NODE)
    with capture_logs() as lines:
        for version in range(1, 4):
            event = tracker.updated(node(version, "192.168.99.10", "node1.example"), Key("", "node1"))
            assert isinstance(event, Updated)
            assert isinstance(event.object, Node)
            assert event.object.addresses == ("192.168.99.10",)
            objects = tuple(tracker.decode_page([node(version, "192.168.99.10", "node1.example")], {}))
            tracker.listed(objects, {})
        tracker.updated(node(4, "192.168.99.10"), Key("", "node1"))
        tracker.updated(node(5, "192.168.99.10", ""), Key("", "node1"))
    assert [line["event"] for line in lines] == ["invalid values skipped"] * 2
    assert [line["reason"] for line in lines] == [
        f"Node node1: status.addresses[1].address is {value}, not an IP address: it is skipped"
        for value in ("'node1.example'", "''")
    ]
