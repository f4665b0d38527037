"""Compute on paper what agents on many nodes cost an API server, beside kube-proxy."""

import gzip
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click
import msgspec

from pykubeproxy.lab.api import Object
from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, NODES, SERVICES, Store
from pykubeproxy.sources.connection import Timing
from tests.bench import workload
from tests.bench.apiserver import objects, protobuf
from tests.bench.workload import Size

NODES_IN_CLUSTER = 5000
# pykubeproxy watches Services, EndpointSlices and its Node; kube-proxy watches ServiceCIDRs as well.
_WATCHES = (3, 4)
_WATCH_SECONDS = sum(Timing().watch) / 2, 450  # the mean; kube-proxy draws from 300 to 600
_BOOKMARK_SECONDS, _NODE_STATUS_SECONDS = 60, 300
# At most, for a pod that a rolling update replaces: the new one has an address, is ready; the old one terminates, is gone.
_EVENTS_PER_POD = 4


class Sizes(NamedTuple):
    """Bytes of the objects of one kind: one of them, an event of it, and the list of all; with gzip as the server does."""

    one: float
    event: float
    list: int
    list_gzip: int


def sizes(items: Sequence[Object], kind: str) -> tuple[Sizes, Sizes]:
    """Return the sizes in JSON and in protobuf."""
    plain = [{name: it[name] for name in it if name not in ("kind", "apiVersion")} for it in items]
    encoded = msgspec.json.encode({"kind": f"{kind}List", "apiVersion": "v1", "metadata": {}, "items": plain})
    events = [len(msgspec.json.encode({"type": "MODIFIED", "object": it})) + 1 for it in items]
    json = Sizes(len(encoded) / len(items), sum(events) / len(items), len(encoded), _gzip(encoded))
    packed = protobuf.listed(items)
    events = [len(protobuf.event(it)) for it in items]
    return json, Sizes(len(packed) / len(items), sum(events) / len(items), len(packed), _gzip(packed))


def show(size: Size) -> None:
    """Print the sizes of the objects and the projection."""
    store = Store(workload.SERVICE_CIDRS)
    with objects.realistic_fields():
        store.load(objects.objects(size))
    services, slices = (sizes(store.list(kind), kind.kind) for kind in (SERVICES, ENDPOINT_SLICES))
    node = len(msgspec.json.encode(store.list(NODES)[0]))
    for name, both in (("services", services), ("endpointslices", slices)):
        for encoding, it in zip(("JSON", "protobuf"), both, strict=True):
            click.echo(
                f"{name}, {encoding}: {it.one:,.0f} bytes each, {it.event:,.0f} an event, {it.list:,} in all, "
                f"{it.list_gzip:,} with gzip"
            )
    click.echo(f"node, JSON: {node:,} bytes")
    click.echo(f"computed for {NODES_IN_CLUSTER} nodes, each with all of these objects:")
    for name, ours, theirs in _rows(services, slices, size):
        click.echo(f"  {name}: pykubeproxy {ours:,.1f}, kube-proxy {theirs:,.1f}")
    rate = NODES_IN_CLUSTER / _NODE_STATUS_SECONDS
    click.echo(f"  node status, MB per second: pykubeproxy {rate * node / 1e6:.2f}")


def _rows(
    services: tuple[Sizes, Sizes], slices: tuple[Sizes, Sizes], size: Size
) -> Iterator[tuple[str, float, float]]:
    """Yield a name, and the figures of pykubeproxy and of kube-proxy."""
    count = NODES_IN_CLUSTER
    ours, theirs = zip(services, slices, strict=True)
    lists = [count * sum(it.list_gzip for it in both) / 1e9 for both in (ours, theirs)]
    plain = [count * sum(it.list for it in both) / 1e9 for both in (ours, theirs)]
    events = [count * it.event / 1e6 for it in slices]
    streamed = count * size.services * sum(it.event for it in theirs) / 1e9
    yield "start, GB, lists with gzip", *lists
    yield "start, GB, lists without gzip", *plain
    yield "start, GB, lists with gzip beside WatchList", lists[0], streamed
    yield "one change, MB", *events
    yield "rolling update of one Service, MB", *(it * _EVENTS_PER_POD * size.endpoints for it in events)
    lifetimes = zip(_WATCHES, _WATCH_SECONDS, strict=True)
    yield "requests per second when idle", *(count * watches / seconds for watches, seconds in lifetimes)
    yield "bookmarks per second when idle", *(count * it / _BOOKMARK_SECONDS for it in _WATCHES)


def _gzip(body: bytes) -> int:
    return len(gzip.compress(body, compresslevel=1, mtime=0))
