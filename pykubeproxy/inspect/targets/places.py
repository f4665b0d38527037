"""Find pods, nodes and addresses in a directory."""

import difflib
import enum
from collections.abc import Iterable

import msgspec

from pykubeproxy.inspect.targets.directory import Directory
from pykubeproxy.inspect.targets.parse import Target, TargetKind
from pykubeproxy.objects import Node
from pykubeproxy.objects.pods import Pod
from pykubeproxy.wording import listed

_MOST_MATCHES = 3


class Unresolved(LookupError):
    """A target has no address; str() is one line that says why and what to do."""


class LocationKind(enum.Enum):
    """What has an address, as --from names it: a pod, a node, or something outside the cluster."""

    POD = "pod"
    NODE = "node"
    OUTSIDE = "outside"


class Place(msgspec.Struct, frozen=True):
    """A pod, a node or a plain address.

    - `addresses`: canonical, the primary one first
    - `kind`: None if unknown; a pod with the network of its node counts as the node
    - `node`: the name of its Node, "" if unknown or outside
    - `pod`: None for nodes and unknown addresses
    """

    target: Target
    addresses: tuple[str, ...]
    kind: LocationKind | None = None
    node: str = ""
    pod: Pod | None = None

    @property
    def is_node(self) -> bool:
        """Whether the addresses are a node's own."""
        return self.kind is LocationKind.NODE


def find_place(target: Target, directory: Directory) -> Place:
    """Find a target other than a Service. Raises Unresolved."""
    match target.kind:
        case TargetKind.POD:
            return _pod(target, directory)
        case TargetKind.NODE:
            return _node(target, directory)
        case _:
            return _address(target, directory)


def _pod(target: Target, directory: Directory) -> Place:
    pod = directory.pod(target.key)
    if pod is None:
        raise missing(target, (f"pod/{key}" for key in directory.pods), directory)
    if pod.finished:
        raise Unresolved(f"{target.without_port} has ended (phase {pod.phase}); name a running pod")
    if not pod.addresses:
        phase = f"phase {pod.phase}" if pod.phase else "not started"
        raise Unresolved(f"{target.without_port} has no address yet ({phase}); wait until it runs")
    on_host = pod.host_network or directory.node_at(pod.addresses[0]) is not None
    return Place(target, pod.addresses, LocationKind.NODE if on_host else LocationKind.POD, pod.node, pod)


def _node(target: Target, directory: Directory) -> Place:
    node = directory.node(target.name)
    if node is None:
        raise missing(target, (f"node/{it.name}" for it in directory.nodes), directory)
    if not node.addresses:
        raise Unresolved(f"{target.without_port} has no address {directory.place}; give an address instead")
    return Place(target, node.addresses, LocationKind.NODE, node.name)


def _address(target: Target, directory: Directory) -> Place:
    address = (target.name,)
    if node := directory.node_at(target.name):
        return Place(target, address, LocationKind.NODE, node.name)
    if pod := directory.pod_at(target.name):
        return Place(target, address, LocationKind.POD, pod.node, pod)
    if directory.is_pod_network(target.name):
        return Place(target, address, LocationKind.POD, _name(directory.node_of_pods_at(target.name)))
    return Place(target, address, LocationKind.OUTSIDE if directory.pod_networks else None)


def _name(node: Node | None) -> str:
    return node.name if node else ""


def missing(target: Target, known: Iterable[str], directory: Directory) -> Unresolved:
    """Return the error about an object that the directory lacks, with similar names."""
    names = sorted(known)
    found = _similar(target, names)
    parts = [f"there is no {target.without_port} {directory.place}", directory.advice.get(target.kind, "")]
    if found:
        parts.append(f"did you mean {' or '.join(found)}?")
    elif names:
        parts.append(f"known: {listed(names, _MOST_MATCHES)}")
    return Unresolved("; ".join(filter(None, parts)))


def _similar(target: Target, names: Iterable[str]) -> list[str]:
    """Return the objects with the most similar names, those in the namespace of the target first."""
    by_name: dict[str, list[str]] = {}
    for text in names:
        by_name.setdefault(text.rpartition("/")[2], []).append(text)
    close = difflib.get_close_matches(target.name, by_name, _MOST_MATCHES)
    found = [text for name in close for text in by_name[name]]
    namespace = target.without_port.removesuffix(target.name)
    return sorted(found, key=lambda text: not text.startswith(namespace))[:_MOST_MATCHES]
