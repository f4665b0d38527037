"""Compute what agents on many nodes cost an API server, beside kube-proxy, which receives protobuf."""

import gzip
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import click
import msgspec

from pykubeproxy.lab.api import Object
from pykubeproxy.lab.apiserver import ENDPOINT_SLICES, NODES, SERVICES, Store
from pykubeproxy.sources import Timing
from tests.bench import workload
from tests.bench.apiserver import objects
from tests.bench.workload import Size


class _Field(NamedTuple):
    """The number of a field, and the fields of its message or the name of another form. Lists repeat a field."""

    number: int
    message: "Mapping[str, _Field] | str" = ""


_TIME = "time"
_JSON = "json"
_INT_OR_STRING = "int or string"
_PAIRS = "pairs"

_OWNER = {
    "apiVersion": _Field(5),
    "kind": _Field(1),
    "name": _Field(3),
    "uid": _Field(4),
    "controller": _Field(6),
    "blockOwnerDeletion": _Field(7),
}
_MANAGED = {
    "manager": _Field(1),
    "operation": _Field(2),
    "apiVersion": _Field(3),
    "time": _Field(4, _TIME),
    "fieldsType": _Field(6),
    "fieldsV1": _Field(7, _JSON),
    "subresource": _Field(8),
}
_META = {
    "name": _Field(1),
    "generateName": _Field(2),
    "namespace": _Field(3),
    "uid": _Field(5),
    "resourceVersion": _Field(6),
    "generation": _Field(7),
    "creationTimestamp": _Field(8, _TIME),
    "labels": _Field(11, _PAIRS),
    "annotations": _Field(12, _PAIRS),
    "ownerReferences": _Field(13, _OWNER),
    "managedFields": _Field(17, _MANAGED),
}
_REFERENCE = {"kind": _Field(1), "namespace": _Field(2), "name": _Field(3), "uid": _Field(4)}
_ENDPOINT = {
    "addresses": _Field(1),
    "conditions": _Field(2, {"ready": _Field(1), "serving": _Field(2), "terminating": _Field(3)}),
    "targetRef": _Field(4, _REFERENCE),
    "nodeName": _Field(6),
    "zone": _Field(7),
}
_SLICE = {
    "metadata": _Field(1, _META),
    "addressType": _Field(4),
    "endpoints": _Field(2, _ENDPOINT),
    "ports": _Field(3, {"name": _Field(1), "protocol": _Field(2), "port": _Field(3)}),
}
_PORT = {
    "name": _Field(1),
    "protocol": _Field(2),
    "port": _Field(3),
    "targetPort": _Field(4, _INT_OR_STRING),
    "nodePort": _Field(5),
}
_SPEC = {
    "ports": _Field(1, _PORT),
    "selector": _Field(2, _PAIRS),
    "clusterIP": _Field(3),
    "clusterIPs": _Field(18),
    "type": _Field(4),
    "sessionAffinity": _Field(7),
    "ipFamilies": _Field(19),
    "ipFamilyPolicy": _Field(17),
    "internalTrafficPolicy": _Field(22),
}
_SERVICE = {
    "metadata": _Field(1, _META),
    "spec": _Field(2, _SPEC),
    "status": _Field(3, {"loadBalancer": _Field(1, {})}),
}
_KINDS = {"EndpointSlice": _SLICE, "Service": _SERVICE}


def item(thing: Object) -> bytes:
    """Return a Service or an EndpointSlice, as in a list. Raises KeyError for a field without a known number."""
    content = {name: value for name, value in thing.items() if name not in ("kind", "apiVersion")}
    return _message(content, _KINDS[thing["kind"]])


def listed(things: Sequence[Object], version: str = "100000") -> bytes:
    """Return a list of objects of one kind."""
    meta = _bytes(1, _bytes(2, version.encode()))
    return _unknown(things[0], "List", meta + b"".join(_bytes(2, item(thing)) for thing in things))


def event(thing: Object) -> bytes:
    """Return an event of a watch."""
    raw = _bytes(1, _unknown(thing, "", item(thing)))
    body = _bytes(1, b"MODIFIED") + _bytes(2, raw)
    return len(body).to_bytes(4) + body


def _unknown(thing: Object, suffix: str, raw: bytes) -> bytes:
    kind = _bytes(1, thing["apiVersion"].encode()) + _bytes(2, f"{thing['kind']}{suffix}".encode())
    return b"k8s\0" + _bytes(1, kind) + _bytes(2, raw) + _bytes(3, b"") + _bytes(4, b"")


def _message(values: Object, fields: Mapping[str, _Field]) -> bytes:
    return b"".join(
        encoded
        for name, value in values.items()
        for one in (value if isinstance(value, list) else [value])
        for encoded in _encoded(one, fields[name])
    )


def _encoded(value: object, field: _Field) -> Iterator[bytes]:
    number, message = field
    match value:
        case None:
            return
        case bool() | int() if message != _INT_OR_STRING:
            yield _varint(number << 3) + _varint(int(value))
        case int():
            yield _bytes(number, b"\x08\x00\x10" + _varint(value) + b"\x1a\x00")
        case str() if message == _TIME:
            seconds = int(datetime.fromisoformat(value).timestamp())
            yield _bytes(number, b"\x08" + _varint(seconds) + b"\x10\x00")
        case str():
            yield _bytes(number, value.encode())
        case dict() if message == _PAIRS:
            for key, text in value.items():
                yield _bytes(number, _bytes(1, key.encode()) + _bytes(2, text.encode()))
        case dict() if message == _JSON:
            yield _bytes(number, _bytes(1, msgspec.json.encode(value)))
        case dict():
            assert not isinstance(message, str)
            yield _bytes(number, _message(value, message))
        case _:
            raise TypeError(f"cannot encode {value!r}")


def _bytes(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


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
    plain = [{name: entry[name] for name in entry if name not in ("kind", "apiVersion")} for entry in items]
    encoded = msgspec.json.encode({"kind": f"{kind}List", "apiVersion": "v1", "metadata": {}, "items": plain})
    events = [len(msgspec.json.encode({"type": "MODIFIED", "object": entry})) + 1 for entry in items]
    json = Sizes(len(encoded) / len(items), sum(events) / len(items), len(encoded), _gzip(encoded))
    packed = listed(items)
    events = [len(event(entry)) for entry in items]
    return json, Sizes(len(packed) / len(items), sum(events) / len(items), len(packed), _gzip(packed))


def show(size: Size) -> None:
    """Print the sizes of the objects and the projection."""
    store = Store(workload.SERVICE_CIDRS)
    with objects.realistic_fields():
        store.load(objects.objects(size))
    services, slices = (sizes(store.list(kind), kind.kind) for kind in (SERVICES, ENDPOINT_SLICES))
    node = len(msgspec.json.encode(store.list(NODES)[0]))
    for name, both in (("services", services), ("endpointslices", slices)):
        for encoding, entry in zip(("JSON", "protobuf"), both, strict=True):
            click.echo(
                f"{name}, {encoding}: {entry.one:,.0f} bytes each, {entry.event:,.0f} an event, {entry.list:,} in all, "
                f"{entry.list_gzip:,} with gzip"
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
    lists = [count * sum(entry.list_gzip for entry in both) / 1e9 for both in (ours, theirs)]
    plain = [count * sum(entry.list for entry in both) / 1e9 for both in (ours, theirs)]
    events = [count * entry.event / 1e6 for entry in slices]
    streamed = count * size.services * sum(entry.event for entry in theirs) / 1e9
    yield "start, GB, lists with gzip", lists[0], lists[1]
    yield "start, GB, lists without gzip", plain[0], plain[1]
    yield "start, GB, lists with gzip beside WatchList", lists[0], streamed
    yield "one change, MB", events[0], events[1]
    pods = _EVENTS_PER_POD * size.endpoints
    yield "rolling update of one Service, MB", events[0] * pods, events[1] * pods
    idle = [count * watches / seconds for watches, seconds in zip(_WATCHES, _WATCH_SECONDS, strict=True)]
    yield "requests per second when idle", idle[0], idle[1]
    bookmarks = [count * watches / _BOOKMARK_SECONDS for watches in _WATCHES]
    yield "bookmarks per second when idle", bookmarks[0], bookmarks[1]


def _gzip(body: bytes) -> int:
    return len(gzip.compress(body, compresslevel=1, mtime=0))
