"""Where the names of pods, Services and nodes are looked up: manifests, an agent, a bundle, an API server, or rules."""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pykubeproxy.bundle.read import Bundle
from pykubeproxy.config import Config, DetectLocalMode
from pykubeproxy.inspect.connection import Directory
from pykubeproxy.inspect.dump.model import services_of
from pykubeproxy.inspect.node import NodeSource, NodeState, Question, ReadError
from pykubeproxy.inspect.targets import ServiceFilter, Target, TargetKind
from pykubeproxy.nodes import host_name
from pykubeproxy.nodes.agent import NoAgent, agent_state
from pykubeproxy.nodes.objects import NoObjects, bundled_agent, open_client
from pykubeproxy.objects import EndpointSlice, Key, Kind, Listed, Node, Service
from pykubeproxy.objects.pods import Pod
from pykubeproxy.pages.servicez import NodeObjects

# Importing pykubeproxy.sources takes long, so only the functions that need it do.
if TYPE_CHECKING:
    from pykubeproxy.sources import Client
    from pykubeproxy.sources.manifests import Manifests

_ASK_SERVER = "add --kubeconfig to ask the API server"
_ASK_OTHERS = "add -f FILE with objects, or --kubeconfig to ask the API server"
_ON_SERVER = "on the API server"
_PODS_FORBIDDEN = "this account may not list pods, so only pods of Services are known; get permission to list pods, or give an address"

_Object = TypeVar("_Object", bound=Service | EndpointSlice | Node | Pod)


def manifest_directory(path: str, manifests: "Manifests", config: Config, here: str = "") -> Directory:
    """Return all objects in files; `here` is the name of the node that the configuration selects."""
    listed = manifests.listed()
    return Directory(
        f"in {'standard input' if path == '-' else path}",
        advice=dict.fromkeys(TargetKind, "give an address, or add the object to the file"),
        services=_of_kind(Service, listed),
        slices=_of_kind(EndpointSlice, listed),
        nodes=_of_kind(Node, listed),
        listed_pods=manifests.pods,
        pod_networks=_pod_networks(config),
        here=here,
    )


def node_directory(
    config: Config,
    source: NodeSource,
    targets: Sequence[Target],
    bundle: Bundle | None = None,
    *,
    live: bool = False,
) -> Directory:
    """Return what targets name, from the configured API server, else from the objects in a bundle, else from the rules.

    For `live` rules, the agent on this node comes before them. Raises ReadError.
    """
    if config.client.kubeconfig or config.client.master:
        known = bundle.manifest.node if bundle else host_name() if live else ""
        return _configured_directory(config, targets, config.hostname_override or known)
    with suppress(NoAgent, NoObjects):
        if bundle:
            objects, of_agent = bundled_agent(bundle)
            return _directory_of(objects, of_agent or config, f"in {bundle.name}")
        if live:
            return _with_pods_of_user(config, _agent_directory(targets), targets)
    return _rules_directory(source, targets)


def _rules_directory(source: NodeSource, targets: Sequence[Target]) -> Directory:
    """Return the Services that comments in rules name."""
    services: tuple[Service, ...] = ()
    states: Sequence[NodeState] = ()
    for target in targets:
        if target.kind is TargetKind.SERVICE:
            for query in (ServiceFilter(target.namespace, target.name), ServiceFilter()):
                states = _states(source, Question(service=query, nftables=True))
                rules = (family_rules for state in states for family_rules in state.rules.values())
                if services := services_of(rules, query):
                    break
    states = states or _states(source, Question(lazily=True, nftables=True))
    return Directory(
        states[0].origin.place if states else "in the rules",
        advice={
            TargetKind.POD: f"rules do not name pods; {_ASK_OTHERS}",
            TargetKind.NODE: f"rules do not name nodes; {_ASK_OTHERS}",
            TargetKind.SERVICE: f"rules name no headless Services; {_ASK_OTHERS}",
        },
        services=services,
    )


def _configured_directory(config: Config, targets: Sequence[Target], here: str) -> Directory:
    """Ask the configured API server for no more than the targets need."""
    from pykubeproxy.sources import SourceError

    found = Directory(_ON_SERVER, pod_networks=_pod_networks(config), here=here)
    try:
        return _with_targets(open_client(config), targets, found)
    except SourceError as error:
        raise ReadError(str(error)) from None


def cluster_directory(client: "Client", targets: Sequence[Target]) -> tuple[Directory, tuple[str, ...]]:
    """Return all Nodes and the objects that targets name, for an address all Services; and remarks.

    If the account may not list pods, so that an address stays unknown, a remark says so. Raises SourceError.
    """
    from pykubeproxy.nodes.cluster import GRANTS
    from pykubeproxy.sources.queries import all_objects, list_kind

    services = [target for target in targets if target.kind is TargetKind.SERVICE]
    to_address = any(target.kind is TargetKind.ADDRESS and target.port for target in targets)
    of_one_service = len(services) == 1 and not to_address
    listed = (list_kind(client, Kind.NODE),) if of_one_service else all_objects(client)
    addresses = [target.name for target in targets if target.kind is TargetKind.ADDRESS]
    pods: tuple[Pod, ...] = ()
    remarks: tuple[str, ...] = ()
    try:
        pods = tuple(pod for address in addresses for pod in _find_pods(client, address=address))
    except _PodsForbidden as error:
        remarks = (f"{error}; {GRANTS}. Only pods in EndpointSlices are known.",)
    everything = Directory(
        _ON_SERVER,
        services=_of_kind(Service, listed),
        slices=_of_kind(EndpointSlice, listed),
        nodes=tuple(sorted(_of_kind(Node, listed), key=lambda node: node.name)),
        listed_pods=pods,
        complete=True,
    )
    return _with_targets(client, targets, everything), remarks


def _states(source: NodeSource, question: Question) -> Sequence[NodeState]:
    return [found for found in source.nodes(question) if isinstance(found, NodeState)]


def _agent_directory(targets: Sequence[Target]) -> Directory:
    """Ask the agent, which knows the pods of Services and its own Node only. Raises NoAgent, ReadError."""
    services = [target.key for target in targets if target.kind is TargetKind.SERVICE]
    if any(target.kind is TargetKind.POD for target in targets):
        found = agent_state(None, slices="all")
    else:
        found = agent_state(None, **({"service": str(services[0])} if services else {}))
        if services and not found.objects.services:
            found = agent_state(None)  # for similar names
    return _directory_of(found.objects, found.config, "in the agent on this node")


def _with_pods_of_user(config: Config, found: Directory, targets: Sequence[Target]) -> Directory:
    """Add pods that the agent does not know from the API server of KUBECONFIG, if the user has set it."""
    kubeconfig = os.environ.get("KUBECONFIG", "")
    unknown = [one for one in targets if one.kind is TargetKind.POD and one.key not in found.pods]
    if not unknown or not Path(kubeconfig).is_file():
        return found
    client = msgspec.structs.replace(config.client, kubeconfig=kubeconfig)
    asked = _configured_directory(msgspec.structs.replace(config, client=client), unknown, found.here)
    return msgspec.structs.replace(found, listed_pods=_joined(found.listed_pods, asked.listed_pods))


def _directory_of(objects: NodeObjects, config: Config, place: str) -> Directory:
    return Directory(
        place,
        advice={
            TargetKind.POD: f"the agent knows only pods of Services; {_ASK_SERVER}",
            TargetKind.NODE: f"the agent knows only its own Node; {_ASK_SERVER}",
            TargetKind.SERVICE: f"the agent knows no headless Services; {_ASK_SERVER}",
        },
        services=objects.services,
        slices=objects.slices,
        nodes=(objects.node,),
        pod_networks=_pod_networks(config),
        here=objects.node.name,
    )


def _pod_networks(config: Config) -> tuple[str, ...]:
    """Return the cluster CIDRs, which are valid only in this mode."""
    detect = config.detect_local
    return detect.cluster_cidrs if detect.mode is DetectLocalMode.CLUSTER_CIDR else ()


class _PodsForbidden(Exception):
    """The account may not list pods."""


def _find_pods(
    client: "Client", namespace: str = "", *, name: str = "", address: str = ""
) -> tuple[Pod, ...]:
    """Return the Pods of a namespace or of all, with this name and primary IP if given.

    Raises SourceError, and _PodsForbidden.
    """
    from pykubeproxy.sources import SourceError
    from pykubeproxy.sources.failures import Failure, Forbidden
    from pykubeproxy.sources.pods import list_pods

    try:
        return list_pods(client, namespace, name=name, address=address)
    except Forbidden as failure:
        raise _PodsForbidden(f"cannot list pods: {failure}") from None
    except Failure as failure:
        raise SourceError(f"cannot list pods: {failure}") from None


def _with_targets(client: "Client", targets: Sequence[Target], found: Directory) -> Directory:
    """Add the objects that targets name, the Nodes of named pods, and the Node `here`. Raises SourceError.

    For a name that does not exist, add all objects of its kind and, for a pod, its namespace. If the account may not list
    pods, add the EndpointSlices of the namespace.
    """
    for target in targets:
        match target.kind:
            case TargetKind.SERVICE if not found.service(target.key):
                found = _with_service(client, target, found)
            case TargetKind.POD:
                found = _with_pod(client, target, found)
            case TargetKind.NODE if not found.node(target.name):
                found = _with_node(client, target, found)
            case _:
                pass
    return _with_nodes_of_pods(client, targets, found)


def _with_service(client: "Client", target: Target, found: Directory) -> Directory:
    from pykubeproxy.sources.queries import list_kind, service_objects

    listed = service_objects(client, target.name, target.namespace, ())
    services = _of_kind(Service, listed) or _of_kind(Service, [list_kind(client, Kind.SERVICE)])
    return msgspec.structs.replace(
        found,
        services=_joined(found.services, services),
        slices=_joined(found.slices, _of_kind(EndpointSlice, listed)),
    )


def _with_pod(client: "Client", target: Target, found: Directory) -> Directory:
    from pykubeproxy.sources.queries import list_kind

    try:
        pods = _find_pods(client, target.namespace, name=target.name) or _find_pods(client, target.namespace)
        return msgspec.structs.replace(found, listed_pods=_joined(found.listed_pods, pods))
    except _PodsForbidden:
        slices = _of_kind(EndpointSlice, [list_kind(client, Kind.ENDPOINT_SLICE, target.namespace)])
        advice = {**found.advice, TargetKind.POD: _PODS_FORBIDDEN}
        return msgspec.structs.replace(found, slices=_joined(found.slices, slices), advice=advice)


def _with_node(client: "Client", target: Target, found: Directory) -> Directory:
    from pykubeproxy.sources.queries import list_kind

    nodes = _of_kind(Node, [list_kind(client, Kind.NODE, name=target.name)])
    nodes = nodes or _of_kind(Node, [list_kind(client, Kind.NODE)])
    return msgspec.structs.replace(found, nodes=_joined(found.nodes, nodes))


def _with_nodes_of_pods(client: "Client", targets: Sequence[Target], found: Directory) -> Directory:
    """Add the Nodes of the named pods, and this one, if the account may read them."""
    from pykubeproxy.sources import SourceError
    from pykubeproxy.sources.queries import list_kind

    pods = (found.pods.get(target.key) for target in targets if target.kind is TargetKind.POD)
    names = {found.here, *(pod.node for pod in pods if pod)} - {"", *(node.name for node in found.nodes)}
    nodes = found.nodes
    with suppress(SourceError):
        for name in sorted(names):
            nodes += _of_kind(Node, [list_kind(client, Kind.NODE, name=name)])
    return msgspec.structs.replace(found, nodes=nodes)


def _of_kind(kind: type[_Object], listed: Iterable[Listed]) -> tuple[_Object, ...]:
    return tuple(object_ for one in listed for object_ in one.objects if isinstance(object_, kind))


def _joined(known: Iterable[_Object], more: Iterable[_Object]) -> tuple[_Object, ...]:
    by_key: dict[Key, _Object] = {object_.key: object_ for object_ in (*known, *more)}
    return tuple(by_key.values())
