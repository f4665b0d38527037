"""Objects as a Table, from which `kubectl get` prints its columns."""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from pykubeproxy.http import Request
from pykubeproxy.lab.apiserver.resources import (
    ENDPOINT_SLICES,
    NAMESPACES,
    NODES,
    PODS,
    SERVICES,
    JsonObject,
    Resource,
)

_ADDRESSES = 3  # of an EndpointSlice, in a cell
_NONE = "<none>"


class _Column(NamedTuple):
    """A column and its cell of an object. `wide` columns are those of `kubectl get -o wide`."""

    name: str
    cell: Callable[[JsonObject], str | int]
    wide: bool = False


def wants_table(request: Request) -> bool:
    """Return whether a client prefers a Table to objects, as kubectl does."""
    first = request.headers.get("accept", "").split(",")[0].replace(" ", "")
    return {"as=Table", "v=v1"} <= set(first.split(";"))


def table(
    resource: Resource, items: Iterable[JsonObject], metadata: JsonObject, *, whole: bool = False
) -> JsonObject:
    """Return objects as a Table. Its rows hold their metadata, or the `whole` objects."""
    columns = [_Column("Name", lambda item: str(item["metadata"]["name"])), *_COLUMNS.get(resource, [_AGE])]
    definitions = [
        {
            "name": name,
            "type": "string",
            "format": "name" if name == "Name" else "",  # kubectl puts the kind in front of it
            "description": "",
            "priority": int(wide),
        }
        for name, _, wide in columns
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": definitions,
        "rows": [
            {"cells": [cell(item) for _, cell, _ in columns], "object": _object(resource, item, whole)}
            for item in items
        ],
    }


def _object(resource: Resource, item: JsonObject, whole: bool) -> JsonObject:
    if whole:
        return {"kind": resource.kind, "apiVersion": resource.api_version, **item}
    return {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": item["metadata"],
    }


def _age(item: JsonObject) -> str:
    created = datetime.fromisoformat(item["metadata"]["creationTimestamp"]).timestamp()
    return age(max(int(time.time() - created), 0))


def age(seconds: int) -> str:
    """Return seconds in one or two units, as kubectl prints them: 90s, 5m10s, 3h, 2d."""
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s"
    if hours < 3:
        return f"{minutes}m"
    return f"{hours}h" if hours < 48 else f"{days}d"


def _joined(values: Iterable[object], limit: int | None = None) -> str:
    texts = [str(value) for value in values]
    more = f" + {len(texts) - limit} more..." if limit is not None and len(texts) > limit else ""
    return ",".join(texts[:limit]) + more


def _pod_status(pod: JsonObject) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    phase = str((pod.get("status") or {}).get("phase", "Pending"))
    return {"Succeeded": "Completed", "Failed": "Error"}.get(phase, phase)


def _containers(pod: JsonObject) -> Sequence[JsonObject]:
    return (pod.get("status") or {}).get("containerStatuses") or ()


def _pod_ready(pod: JsonObject) -> str:
    ready = sum(bool(container.get("ready")) for container in _containers(pod))
    return f"{ready}/{len(pod['spec'].get('containers') or ())}"


def _gates(pod: JsonObject) -> str:
    gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
    conditions = (pod.get("status") or {}).get("conditions") or ()
    open_ = {one["type"] for one in conditions if one["status"] == "True"}
    return f"{len(open_.intersection(gates))}/{len(gates)}" if gates else _NONE


def _cluster_ip(service: JsonObject) -> str:
    return str(service["spec"].get("clusterIP") or _NONE)


def _external_ip(service: JsonObject) -> str:
    spec = service["spec"]
    if spec.get("type") == "ExternalName":
        return str(spec.get("externalName", ""))
    ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()
    balancers = [one.get("ip") or one.get("hostname") for one in ingress]
    pending = "<pending>" if spec.get("type") == "LoadBalancer" and not balancers else ""
    return _joined([*(pending and [pending]), *balancers, *(spec.get("externalIPs") or ())]) or _NONE


def _service_ports(service: JsonObject) -> str:
    texts = []
    for port in service["spec"].get("ports") or ():
        node_port = f":{port['nodePort']}" if port.get("nodePort") else ""
        texts.append(f"{port['port']}{node_port}/{port['protocol']}")
    return _joined(texts) or _NONE


def _selector(service: JsonObject) -> str:
    selector = service["spec"].get("selector") or {}
    return _joined(f"{key}={value}" for key, value in selector.items()) or _NONE


def _slice_ports(slice_: JsonObject) -> str:
    return _joined(port.get("port", "*") for port in slice_.get("ports") or ()) or "<unset>"


def _slice_endpoints(slice_: JsonObject) -> str:
    endpoints = slice_.get("endpoints") or ()
    return _joined((one["addresses"][0] for one in endpoints), _ADDRESSES) or "<unset>"


def _node_ready(node: JsonObject) -> str:
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((one["status"] for one in conditions if one["type"] == "Ready"), "Unknown")
    word = {"True": "Ready", "False": "NotReady"}.get(ready, "Unknown")
    return f"{word},SchedulingDisabled" if node["spec"].get("unschedulable") else word


def _internal_ip(node: JsonObject) -> str:
    addresses = (node.get("status") or {}).get("addresses") or ()
    return next((one["address"] for one in addresses if one["type"] == "InternalIP"), _NONE)


def _version(node: JsonObject) -> str:
    return str(((node.get("status") or {}).get("nodeInfo") or {}).get("kubeletVersion", ""))


_AGE = _Column("Age", _age)
_COLUMNS: dict[Resource, Sequence[_Column]] = {
    PODS: [
        _Column("Ready", _pod_ready),
        _Column("Status", _pod_status),
        _Column("Restarts", lambda pod: sum(int(one.get("restartCount", 0)) for one in _containers(pod))),
        _AGE,
        _Column("IP", lambda pod: (pod.get("status") or {}).get("podIP") or _NONE, wide=True),
        _Column("Node", lambda pod: pod["spec"].get("nodeName") or _NONE, wide=True),
        _Column("Readiness Gates", _gates, wide=True),
    ],
    SERVICES: [
        _Column("Type", lambda service: service["spec"].get("type", "ClusterIP")),
        _Column("Cluster-IP", _cluster_ip),
        _Column("External-IP", _external_ip),
        _Column("Port(s)", _service_ports),
        _AGE,
        _Column("Selector", _selector, wide=True),
    ],
    ENDPOINT_SLICES: [
        _Column("AddressType", lambda slice_: slice_["addressType"]),
        _Column("Ports", _slice_ports),
        _Column("Endpoints", _slice_endpoints),
        _AGE,
    ],
    NODES: [
        _Column("Status", _node_ready),
        _AGE,
        _Column("Version", _version),
        _Column("Internal-IP", _internal_ip, wide=True),
    ],
    NAMESPACES: [_Column("Status", lambda namespace: (namespace.get("status") or {}).get("phase", "")), _AGE],
}
