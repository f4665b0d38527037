"""The benchmark of the API server's side counts what an agent sends and receives."""

from pathlib import Path

from tests.bench.apiserver import protobuf
from tests.bench.apiserver.meter import Meter
from tests.bench.apiserver.run import Child, write_kubeconfig
from tests.bench.apiserver.server import Cluster
from tests.bench.workload import Size

CHANGES = 20


def test_counts_a_start_and_changes(tmp_path: Path) -> None:
    """The bytes at the sockets are those of the lists and events, plus little for TLS and headers."""
    with Cluster(Size(5, 3), tmp_path) as cluster, Meter(cluster.server.port) as meter:
        config = write_kubeconfig(meter.listen(), tmp_path, "agent")
        with Child("tests.bench.apiserver.agents", str(config), "1") as agent:
            agent.read()
            cluster.counts.wait_for(lambda counts: sum(name.startswith("watch") for name in counts) == 3)
            start = meter.traffic()
            cluster.change(CHANGES, watches=1)
            agent.ask(str(CHANGES))
            changes, counts = meter.traffic().since(start), cluster.counts.snapshot()

    assert (start.connections, start.open, changes.connections, changes.open) == (3, 3, 0, 3)
    assert {name: count.requests for name, count in counts.items()} == {
        f"{verb} {plural}": 1
        for verb in ("list", "watch")
        for plural in ("services", "endpointslices", "nodes")
    }
    assert counts["watch endpointslices"].events == CHANGES
    assert counts["watch services"].events == counts["watch nodes"].events == 0
    sent = counts["watch endpointslices"].bytes
    assert sent < changes.received < sent + 100 * CHANGES + 2000
    lists = sum(count.bytes for name, count in counts.items() if name.startswith("list"))
    assert lists < start.received < lists + 20_000
    assert changes.sent == 0


def test_encodes_protobuf() -> None:
    """Fields have their numbers and lengths."""
    endpoint = {"addresses": ["10.0.0.1"], "conditions": {"ready": True}}
    thing = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "a", "labels": {"x": "y"}},
        "endpoints": [endpoint, endpoint],
        "ports": [{"port": 8080}],
    }
    meta = b"\x0a\x0b\x0a\x01a\x5a\x06\x0a\x01x\x12\x01y"
    each = b"\x12\x0e\x0a\x0810.0.0.1\x12\x02\x08\x01"
    assert protobuf.item(thing) == meta + 2 * each + b"\x1a\x03\x18\x90\x3f"
    assert protobuf.listed([thing]).startswith(b"k8s\0")
    event = protobuf.event(thing)
    assert int.from_bytes(event[:4]) == len(event) - 4
