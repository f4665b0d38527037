"""Read the tables of nodes through an API server, one node at a time or side by side."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec

from pykubeproxy.objects import Family, Node, family_of
from pykubeproxy.remote.debug_pods import DebugPods
from pykubeproxy.remote.proxies import ProxyPod, find_other_proxies, find_proxies
from pykubeproxy.remote.side_by_side import side_by_side
from pykubeproxy.remote.tables import has_nftables_proxy, read_tables, runs_ipvs
from pykubeproxy.rules.in_use import tables_in_use
from pykubeproxy.rules.saves import InvalidSave, SavedTables
from pykubeproxy.rules.skeleton import NAT_SERVICES
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.exec import ContainerRef, NotInImage
from pykubeproxy.sources.failures import Failure, Forbidden
from pykubeproxy.sources.watch import SourceError

_NO_POD = (
    "no pod of kube-proxy or pykubeproxy on the host network; if it has other labels or is not in kube-system, use"
    " --pod-selector LABELS or --pod-namespace NAME; if it runs without a pod, as in k3s, use --debug-image IMAGE,"
    " or save a bundle on the node"
)
_OTHER_MODES = {"ipvs": "IPVS", "nftables": "nftables", "kernelspace": "kernelspace"}


class NodeAccess(msgspec.Struct, frozen=True):
    """How to reach nodes: a client of the API server, and which pods to use.

    `pod_selector` replaces the labels of proxy pods, `pod_namespace` their namespace. With `debug_pods`, a node without a
    usable proxy pod gets a debug pod while it is read.
    """

    client: Client
    pod_selector: str = ""
    pod_namespace: str = ""
    debug_pods: DebugPods | None = None


class ReadNode(msgspec.Struct, frozen=True):
    """The tables of one node, of the backend in use.

    `pod` is NAMESPACE/NAME of the pod in which they were read; `proxy` names the proxy, such as "pykubeproxy 0.1.0" or
    "kube-proxy v1.35.1". `other_backend` is "nft" or "legacy" if that has service-proxy rules too, else "". `unread` says
    why the tables of a family are missing.
    """

    node: Node
    tables: Mapping[Family, SavedTables]
    pod: str
    proxy: str
    other_backend: str = ""
    unread: Mapping[Family, str] = {}

    @property
    def notes(self) -> Sequence[str]:
        """What these tables do not show."""
        notes = [
            f"{family.value} rules could not be read: {reason}" for family, reason in self.unread.items()
        ]
        if self.other_backend:
            notes.append(
                f"the {self.other_backend} tables have service-proxy rules too, and packets pass both"
            )
        return notes

    @property
    def complete(self) -> bool:
        """Whether no family of the node's addresses is missing."""
        return not any(family_of(it) in self.unread for it in self.node.addresses)


class UnreadNode(msgspec.Struct, frozen=True):
    """A node without tables to compare; `reason` says why, and what to do.

    `other_proxy` is True if no fault is the cause: the node's proxy does not use such rules by design. `mode` is the mode
    of its kube-proxy, "ipvs", "nftables" or "kernelspace", or "" if unknown. `proxy` names the proxy and `pod` its pod;
    both are "" without a pod.
    """

    node: Node
    reason: str
    other_proxy: bool = False
    mode: str = ""
    proxy: str = ""
    pod: str = ""


class NodePods(msgspec.Struct, frozen=True):
    """The pods of proxies by node, and the names of other programs that may serve Services there."""

    proxies: Mapping[str, Sequence[ProxyPod]]
    others: Mapping[str, str]

    def proxy(self, node: Node) -> ProxyPod | None:
        """Return the best pod of the proxy on a node: a running one if possible, None without any."""
        return next(iter(self.proxies.get(node.name, ())), None)


def read_nodes(
    access: NodeAccess, nodes: Iterable[Node], *, at_once: int = 16
) -> Iterator[ReadNode | UnreadNode]:
    """Yield each node when it has been read; read at most `at_once` side by side.

    A node that cannot be read costs only its own tables. Raises SourceError if the pods cannot be listed.
    """
    wanted = tuple(nodes)
    pods = find_node_pods(access, wanted)
    return side_by_side(lambda node: read_node(access, node, pods), wanted, at_once)


def find_node_pods(access: NodeAccess, nodes: Sequence[Node]) -> NodePods:
    """Return the pods of the proxies of these nodes. Raises SourceError."""
    only = nodes[0].name if len(nodes) == 1 else ""
    try:
        proxies = find_proxies(
            access.client, pod_selector=access.pod_selector, namespace=access.pod_namespace, node=only
        )
        without = [] if access.pod_selector else [it.name for it in nodes if it.name not in proxies]
        return NodePods(proxies, find_other_proxies(access.client, without))
    except Failure as failure:
        advice = (
            "; manifests/inspect/rbac.yaml grants what is needed" if isinstance(failure, Forbidden) else ""
        )
        raise SourceError(f"cannot list the pods of proxies: {failure}{advice}") from None


def read_node(access: NodeAccess, node: Node, pods: NodePods) -> ReadNode | UnreadNode:
    """Read the tables of one node; in a debug pod if its proxy has no pod that can print them."""
    proxy = pods.proxy(node)
    outcome = _read_node(access, node, proxy, pods.others.get(node.name, ""))
    if proxy and isinstance(outcome, UnreadNode):
        return msgspec.structs.replace(outcome, proxy=str(proxy), pod=str(proxy.pod))
    return outcome


def _read_node(access: NodeAccess, node: Node, proxy: ProxyPod | None, other: str) -> ReadNode | UnreadNode:
    if proxy and proxy.mode_flag in _OTHER_MODES:
        return _in_other_mode(node, proxy.mode_flag, proxy)
    if is_windows(node):
        return UnreadNode(
            node, "runs Windows, whose proxies write no iptables rules", True, "kernelspace" if proxy else ""
        )
    containers: list[AbstractContextManager[ContainerRef]] = []
    if proxy and proxy.pod.runs:
        containers.append(nullcontext(proxy.target))
    if access.debug_pods:
        containers.append(access.debug_pods.on(node.name))
    outcome = _without_container(node, proxy, other)
    for container in containers:
        try:
            with container as opened:
                return _read(access.client, node, opened, proxy, other)
        except NotInImage as failure:
            outcome = UnreadNode(node, f"{failure}; use --debug-image IMAGE with an image that has it")
        except (Failure, InvalidSave) as failure:
            return UnreadNode(node, str(failure))
    return outcome


def is_windows(node: Node) -> bool:
    """Return whether a node runs Windows: it has no iptables, and no pods of Linux images."""
    return node.os == "windows"


def _without_container(node: Node, proxy: ProxyPod | None, other: str) -> UnreadNode:
    """Return why a node has no container that can print its tables."""
    if proxy:
        state = "being deleted" if proxy.pod.deleting else proxy.pod.phase
        problem = proxy.container.problem or proxy.pod.reason
        reason = f"pod {proxy.pod} is {state}{f' ({problem})' if problem else ''}"
        return UnreadNode(node, f"{reason}; use --debug-image IMAGE to read the rules without it")
    if other:
        return UnreadNode(node, f"runs {other} and no kube-proxy", other_proxy=True)
    return UnreadNode(node, _NO_POD)


def _read(
    client: Client, node: Node, container: ContainerRef, proxy: ProxyPod | None, other: str
) -> ReadNode | UnreadNode:
    """Read the tables, and tell the proxy's mode by them. Raises Failure and InvalidSave."""
    printed = read_tables(client, container)
    used = tables_in_use(printed.tables)
    if any(runs_ipvs(it.ruleset) for it in used.tables):
        return _in_other_mode(node, "ipvs", proxy)
    if any(NAT_SERVICES in it.ruleset.chains for it in used.tables):
        tables = {it.ruleset.family: it for it in used.tables}
        return ReadNode(node, tables, str(container), _title(proxy), used.other, printed.unread)
    if has_nftables_proxy(client, container):
        return _in_other_mode(node, "nftables", proxy)
    if other:
        return UnreadNode(node, f"runs {other} and has no rules of kube-proxy", other_proxy=True)
    advice = f"; run `kubectl logs -n {proxy.pod.namespace} {proxy.pod.name}`" if proxy else ""
    return UnreadNode(node, f"no service-proxy rules{advice}")


def _in_other_mode(node: Node, mode: str, proxy: ProxyPod | None) -> UnreadNode:
    return UnreadNode(node, f"runs {_title(proxy)} in {_OTHER_MODES[mode]} mode", True, mode)


def _title(proxy: ProxyPod | None) -> str:
    return str(proxy) if proxy else "a proxy without a pod"
