"""Read the tables of nodes side by side."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.saves import SavedTables
from pykubeproxy.sources import Client


class NodeAccess(msgspec.Struct, frozen=True):
    """How to reach nodes: a client of the API server, and which pods to use.

    `pod_selector` replaces the labels by which proxy pods are found. With `debug_image`, nodes without such a pod get a
    pod with that image while they are read.
    """

    client: Client
    pod_selector: str = ""
    debug_image: str = ""


class ReadNode(msgspec.Struct, frozen=True):
    """The tables of one node, of the backend in use.

    `pod` is NAMESPACE/NAME of the pod that was asked; `proxy` names the proxy, such as "pykubeproxy" or
    "kube-proxy v1.35.1". `other_backend` is "nft" or "legacy" if that has service-proxy rules too, else "".
    """

    node: Node
    tables: Mapping[Family, SavedTables]
    pod: str
    proxy: str
    other_backend: str = ""


class UnreadNode(msgspec.Struct, frozen=True):
    """A node without tables to compare; `reason` says why, and what to do.

    `other_proxy` is True if no fault is the cause: the node's proxy does not use such rules by design.
    """

    node: Node
    reason: str
    other_proxy: bool = False


def read_nodes(
    access: NodeAccess, nodes: Iterable[Node], *, at_once: int = 16
) -> Iterator[ReadNode | UnreadNode]:
    """Yield each node when it has been read; read at most `at_once` side by side."""
    raise NotImplementedError
