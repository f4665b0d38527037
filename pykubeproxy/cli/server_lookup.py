"""Look up on an API server what targets name, for commands on a node and for the plugin."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from pykubeproxy.inspect.targets import Directory, Target, TargetKind
from pykubeproxy.objects import EndpointSlice, Key, Kind, Listed, Node, Service
from pykubeproxy.objects.pods import Pod
from pykubeproxy.sources import Client, SourceError, list_kind, service_objects
from pykubeproxy.sources.failures import Failure, Forbidden
from pykubeproxy.sources.pods import list_pods

ON_SERVER = "on the API server"
_PODS_FORBIDDEN = "this account may not list pods, so only pods of Services are known; get permission to list pods, or give an address"
_Object = TypeVar("_Object", bound=Service | EndpointSlice | Node | Pod)


class PodsForbidden(SourceError):
    """The account may not list pods."""


def with_targets(client: Client, targets: Sequence[Target], found: Directory) -> Directory:
    """Add the objects that targets name, the Nodes of named pods, and the Node `here`. Raises SourceError.

    For a name that does not exist, add all objects of its kind and, for a pod, its namespace. If the account may not list
    pods, add the EndpointSlices of the namespace.
    """
    for target in targets:
        match target.kind:
            case TargetKind.SERVICE:
                found = _with_service(client, target, found)
            case TargetKind.POD:
                found = _with_pod(client, target, found)
            case TargetKind.NODE:
                found = _with_node(client, target, found)
            case _:
                pass
    return _with_nodes_of_pods(client, targets, found)


def find_pods(client: Client, namespace: str = "", *, name: str = "", address: str = "") -> tuple[Pod, ...]:
    """Return the Pods of a namespace or of all, with this name and primary IP if given.

    Raises SourceError, and PodsForbidden.
    """
    try:
        return list_pods(client, namespace, name=name, address=address)
    except Forbidden as failure:
        raise PodsForbidden(f"cannot list pods: {failure}") from None
    except Failure as failure:
        raise SourceError(f"cannot list pods: {failure}") from None


def of_kind(kind: type[_Object], listed: Iterable[Listed]) -> tuple[_Object, ...]:
    """Return the objects of one kind."""
    return tuple(it for one in listed for it in one.objects if isinstance(it, kind))


def _with_service(client: Client, target: Target, found: Directory) -> Directory:
    if found.service(target.key):
        return found
    listed = service_objects(client, target.name, target.namespace, ())
    services = of_kind(Service, listed) or of_kind(Service, [list_kind(client, Kind.SERVICE)])
    return msgspec.structs.replace(
        found,
        services=_merged(found.services, services),
        slices=_merged(found.slices, of_kind(EndpointSlice, listed)),
    )


def _with_pod(client: Client, target: Target, found: Directory) -> Directory:
    try:
        pods = find_pods(client, target.namespace, name=target.name) or find_pods(client, target.namespace)
        return msgspec.structs.replace(found, listed_pods=_merged(found.listed_pods, pods))
    except PodsForbidden:
        slices = of_kind(EndpointSlice, [list_kind(client, Kind.ENDPOINT_SLICE, target.namespace)])
        advice = {**found.advice, TargetKind.POD: _PODS_FORBIDDEN}
        return msgspec.structs.replace(found, slices=_merged(found.slices, slices), advice=advice)


def _with_node(client: Client, target: Target, found: Directory) -> Directory:
    if found.node(target.name):
        return found
    nodes = of_kind(Node, [list_kind(client, Kind.NODE, name=target.name)])
    nodes = nodes or of_kind(Node, [list_kind(client, Kind.NODE)])
    return msgspec.structs.replace(found, nodes=_merged(found.nodes, nodes))


def _with_nodes_of_pods(client: Client, targets: Sequence[Target], found: Directory) -> Directory:
    """Add the Nodes of the named pods, and this one, if the account may read them."""
    pods = (found.pod(it.key) for it in targets if it.kind is TargetKind.POD)
    names = {found.here, *(pod.node for pod in pods if pod)} - {"", *(it.name for it in found.nodes)}
    nodes = found.nodes
    with suppress(SourceError):
        for name in sorted(names):
            nodes += of_kind(Node, [list_kind(client, Kind.NODE, name=name)])
    return msgspec.structs.replace(found, nodes=nodes)


def _merged(known: Iterable[_Object], more: Iterable[_Object]) -> tuple[_Object, ...]:
    """Return all these objects, each of them once."""
    by_key: dict[Key, _Object] = {it.key: it for it in (*known, *more)}
    return tuple(by_key.values())
