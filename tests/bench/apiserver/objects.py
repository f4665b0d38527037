"""Objects as long as in a real cluster: with owners, annotations, references to pods and managedFields.

The lab's API server keeps no managedFields, so `realistic_fields` adds to each stored object those that the usual clients
leave: kubectl on Services, kube-controller-manager on EndpointSlices, the kubelet on Nodes.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import msgspec

from pykubeproxy.lab.api import Object
from pykubeproxy.lab.apiserver import store
from pykubeproxy.lab.apiserver.resources import ENDPOINT_SLICES, NODES, SERVICES, Resource
from pykubeproxy.lab.apiserver.store import Stored, encoded
from tests.bench import workload
from tests.bench.workload import Size

_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_TRIGGER = "endpoints.kubernetes.io/last-change-trigger-time"
_WRITTEN = re.compile(rb'"managedFields":\[\{"operation":"Update","time":"([^"]*)"\}\]')
_IMAGES = 50  # the kubelet reports at most 50 (nodeStatusMaxImages)
_CONDITIONS = ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")


def objects(size: Size) -> Iterator[Object]:
    """Yield all objects that a proxy reads from the API server."""
    for item in workload.objects(size):
        match item["kind"]:
            case "Service":
                yield _service(item)
            case "EndpointSlice":
                yield _slice(item)
            case _:
                yield _node(item)


def change(size: Size, number: int) -> Object:
    """Return an EndpointSlice after a change of one endpoint; changes go round the Services."""
    round_, service = divmod(number, size.services)
    unready = [round_ // 2 % size.endpoints] if round_ % 2 == 0 else []
    return _slice(workload.slices(size, service, unready)[0], number)


@contextmanager
def realistic_fields() -> Iterator[None]:
    """Let the lab's API server store managedFields of the usual length."""
    with mock.patch.object(store, "encoded", _encoded):
        yield


def _encoded(resource: Resource, item: Object, version: int) -> Stored:
    stored = encoded(resource, item, version)
    if resource not in (SERVICES, ENDPOINT_SLICES, NODES):
        return stored

    def entries(match: re.Match[bytes]) -> bytes:
        return b'"managedFields":' + msgspec.json.encode(_managed(resource, item, match[1].decode()))

    return msgspec.structs.replace(stored, body=_WRITTEN.sub(entries, stored.body, count=1))


def _managed(resource: Resource, item: Object, time: str) -> list[Object]:
    """Return the entries of the usual writers of an object."""
    of_metadata = _fields({name: item["metadata"].get(name) for name in ("annotations", "labels")})
    if resource is SERVICES:
        spec: Object = {
            f"f:{name}": {} for name in ("internalTrafficPolicy", "selector", "sessionAffinity", "type")
        }
        ports: Object = {
            f'k:{{"port":{port["port"]},"protocol":"{port["protocol"]}"}}': {".": {}} | _fields(port)
            for port in item["spec"]["ports"]
        }
        fields = {"f:metadata": of_metadata, "f:spec": spec | {"f:ports": {".": {}} | ports}}
        return [_entry("kubectl-client-side-apply", resource, time, fields)]
    if resource is ENDPOINT_SLICES:
        owners: Object = {
            f'k:{{"uid":"{entry["uid"]}"}}': {} for entry in item["metadata"].get("ownerReferences", ())
        }
        of_metadata |= {"f:generateName": {}, "f:ownerReferences": {".": {}} | owners}
        fields = {"f:addressType": {}, "f:endpoints": {}, "f:metadata": of_metadata, "f:ports": {}}
        return [_entry("kube-controller-manager", resource, time, fields)]
    conditions: Object = {
        f'k:{{"type":"{entry["type"]}"}}': {".": {}} | _fields(entry)
        for entry in item["status"].get("conditions", ())
    }
    status = {"f:status": {"f:conditions": conditions, "f:images": {}, "f:nodeInfo": {}}}
    return [
        _entry("kubelet", resource, time, {"f:metadata": of_metadata}),
        _entry("kubelet", resource, time, status) | {"subresource": "status"},
    ]


def _entry(manager: str, resource: Resource, time: str, fields: Object) -> Object:
    return {
        "manager": manager,
        "operation": "Update",
        "apiVersion": resource.api_version,
        "time": time,
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
    }


def _fields(value: object) -> Object:
    if not isinstance(value, dict):
        return {}
    inner = {f"f:{name}": _fields(member) for name, member in value.items() if member is not None}
    return {name: {".": {}} | members if members else {} for name, members in inner.items()}


def _service(item: Object) -> Object:
    meta = item["metadata"]
    applied = item | {"metadata": {name: value for name, value in meta.items() if name != "annotations"}}
    text = msgspec.json.encode(applied).decode() + "\n"
    return item | {"metadata": meta | {"annotations": {_APPLIED: text}}}


def _slice(item: Object, number: int = 0) -> Object:
    meta = item["metadata"]
    service = meta["labels"]["kubernetes.io/service-name"]
    labels = {"app.kubernetes.io/name": service, "app.kubernetes.io/part-of": meta["namespace"]}
    owner = {"apiVersion": "v1", "kind": "Service", "name": service, "uid": _uid(service)}
    added = {
        "generateName": f"{service}-",
        "labels": labels | meta["labels"],
        "annotations": {_TRIGGER: f"2026-11-22T10:{number // 60 % 60:02}:{number % 60:02}Z"},
        "ownerReferences": [owner | {"controller": True, "blockOwnerDeletion": True}],
    }
    endpoints = [_endpoint(endpoint, meta["namespace"], service) for endpoint in item["endpoints"]]
    return item | {"metadata": meta | added, "endpoints": endpoints}


def _endpoint(endpoint: Object, namespace: str, service: str) -> Object:
    uid = _uid(endpoint["addresses"][0])
    pod = {"kind": "Pod", "namespace": namespace, "name": f"{service}-{uid[:10]}-{uid[-5:]}", "uid": uid}
    return endpoint | {"targetRef": pod}


def _node(item: Object) -> Object:
    time = "2026-11-22T10:00:00Z"
    conditions = [
        {
            "type": kind,
            "status": "True" if kind == "Ready" else "False",
            "lastHeartbeatTime": time,
            "lastTransitionTime": time,
            "reason": f"KubeletHas{kind}",
            "message": f"kubelet has {kind}",
        }
        for kind in _CONDITIONS
    ]
    images = [
        {
            "names": [
                f"registry.example/team/{uid}@sha256:{2 * uid[:32]:0<64}",
                f"registry.example/team/{uid}:v1",
            ],
            "sizeBytes": 50_000_000,
        }
        for uid in map(_uid, map(str, range(_IMAGES)))
    ]
    return item | {"status": item["status"] | {"conditions": conditions, "images": images}}


def _uid(name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, name))
