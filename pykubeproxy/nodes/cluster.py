"""The nodes of a cluster, read through its API server: by exec into the pods of their proxies, or into debug pods."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from pykubeproxy.inspect.flows import FlowTable, parse_flow_table
from pykubeproxy.inspect.node import (
    UNREAD_NFTABLES,
    NodeRules,
    NodeState,
    Origin,
    Question,
    ReadError,
    UnknownNode,
    nftables_remarks,
    unread_rules,
)
from pykubeproxy.inspect.packets.packet import NodeNetwork
from pykubeproxy.nodes import proc_routes
from pykubeproxy.nodes.debug_pods import DebugPods
from pykubeproxy.nodes.proxies import ProxyPod, find_other_proxies, find_proxies
from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.names import NFT_TABLES
from pykubeproxy.rules.nft_list import NftRuleset, read_nft_lists
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.rules.save_files import InvalidSave, SavedFile, SavedTables, read_saves, tables_in_use
from pykubeproxy.rules.skeleton import NAT_SERVICES
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Failure, Forbidden
from pykubeproxy.sources.pods import ContainerRef, NotInImage, run_in_pod
from pykubeproxy.sources.queries import node_images
from pykubeproxy.wording import listed, one_line

_NO_POD = (
    "no pod of kube-proxy or pykubeproxy on the host network; if it has other labels or is not in kube-system, use"
    " --pod-selector LABELS or --pod-namespace NAME; if it runs without a pod, as in k3s, use --debug-image IMAGE,"
    " or save a bundle on the node"
)
GRANTS = "manifests/inspect/rbac.yaml grants what is needed"
_OTHER_MODES = {"ipvs": "IPVS", "nftables": "nftables", "kernelspace": "kernelspace"}
_PREFIX = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
# After so many seconds without output, iptables-save hangs; it writes large tables without pauses.
_SILENCE = 30.0
# iptables-nft-save prints this warning to stdout or stderr, depending on version.
_LEGACY_TOO = "-legacy tables present"
_IPVS = "--match-set KUBE-"
_ALL_IPTABLES = Question()
# Programs that print the flows of a node; the first one is in our image, and prints affinity lists, too.
_FLOW_COMMANDS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("pykubeproxy", "flows"),),
    (("conntrack", "-L", "-f", "ipv4"), ("conntrack", "-L", "-f", "ipv6")),
    (("cat", "/proc/net/nf_conntrack"),),
)
_RECENT_COMMAND = ("grep", "-rH", "src=", "/proc/net/xt_recent/")
# Parts of the names of images that are likely to have iptables-save and sleep, the likeliest first.
_WITH_IPTABLES = (
    "pykubeproxy", "kube-proxy", "distroless-iptables", "hardened-kubernetes", "calico/node", "hardened-calico",
    "cilium/cilium", "flannel", "nftables", "iptables",
)  # fmt: skip
_MOST_IMAGES = 2

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class NodeAccess(msgspec.Struct, frozen=True):
    """How to reach nodes: a client of the API server, and which pods to use.

    - `pod_selector`, `pod_namespace`: replace the labels of proxy pods, and their namespace
    - `debug_pods`: start a debug pod on a node without a usable proxy pod while it is read
    - `at_once`: how many nodes are read side by side
    """

    client: Client
    pod_selector: str = ""
    pod_namespace: str = ""
    debug_pods: DebugPods | None = None
    at_once: int = 16


class NodePods(msgspec.Struct, frozen=True):
    """The pods of proxies by node, and the names of other programs that may serve Services there."""

    proxies: Mapping[str, Sequence[ProxyPod]]
    others: Mapping[str, str]

    def proxy(self, node: Node) -> ProxyPod | None:
        """Return the best pod of the proxy on a node: a running one if possible, None without any."""
        return next(iter(self.proxies.get(node.name, ())), None)


class ClusterNodes(msgspec.Struct, frozen=True):
    """Nodes of a cluster. `advance` is called after each of them, for a progress bar."""

    access: NodeAccess
    wanted: Sequence[Node]
    advance: Callable[[], None] = lambda: None

    def nodes(self, question: Question) -> Iterator[NodeState | UnknownNode]:
        """Yield each node when it has been read. Raises ReadError if the pods cannot be listed. See NodeSource."""
        wanted = [node for node in self.wanted if not question.nodes or node.name in question.nodes]
        if wanted:
            read = partial(read_node, self.access, question=question)
            for found in on_each_node(self.access, read, wanted, self.advance):
                yield _only(found, question.families)


def _only(found: NodeState | UnknownNode, families: tuple[Family, ...]) -> NodeState | UnknownNode:
    if isinstance(found, UnknownNode) or set(families) >= found.rules.keys():
        return found
    rules = {family: node_rules for family, node_rules in found.rules.items() if family in families}
    return msgspec.structs.replace(found, rules=rules)


def on_each_node(
    access: NodeAccess,
    function: Callable[[Node, NodePods], _Result],
    nodes: Sequence[Node],
    advance: Callable[[], None] = lambda: None,
) -> Iterator[_Result]:
    """Yield what a function returns for nodes, in any order. Raises ReadError if the pods cannot be listed."""
    pods = find_node_pods(access, nodes)
    for result in side_by_side(lambda node: function(node, pods), nodes, access.at_once):
        yield result
        advance()


def find_node_pods(access: NodeAccess, nodes: Sequence[Node]) -> NodePods:
    """Return the pods of the proxies of these nodes. Raises ReadError."""
    only = nodes[0].name if len(nodes) == 1 else ""
    try:
        proxies = find_proxies(
            access.client, pod_selector=access.pod_selector, namespace=access.pod_namespace, node=only
        )
        without = [] if access.pod_selector else [node.name for node in nodes if node.name not in proxies]
        return NodePods(proxies, find_other_proxies(access.client, without))
    except Failure as failure:
        advice = f"; {GRANTS}" if isinstance(failure, Forbidden) else ""
        raise ReadError(f"cannot list the pods of proxies: {failure}{advice}") from None


def read_node(
    access: NodeAccess, node: Node, pods: NodePods, *, question: Question = _ALL_IPTABLES
) -> NodeState | UnknownNode:
    """Read the tables of one node; in a debug pod if its proxy has no pod that can print them."""
    proxy = pods.proxy(node)
    found = _read_node(access, node, proxy, pods.others.get(node.name, ""), question)
    if proxy and isinstance(found, UnknownNode):
        return msgspec.structs.replace(found, proxy=str(proxy), pod=str(proxy.pod))
    return found


def is_windows(node: Node) -> bool:
    """Return whether a node runs Windows: it has no iptables, and no pods of Linux images."""
    return node.os == "windows"


def _read_node(
    access: NodeAccess, node: Node, proxy: ProxyPod | None, other: str, question: Question
) -> NodeState | UnknownNode:
    if (
        proxy
        and proxy.mode_flag in _OTHER_MODES
        and not (question.nftables and proxy.mode_flag == "nftables")
    ):
        return _in_other_mode(node, proxy.mode_flag, proxy)
    if is_windows(node):
        return UnknownNode(
            node, "runs Windows, whose proxies write no iptables rules", True, "kernelspace" if proxy else ""
        )
    containers: list[AbstractContextManager[ContainerRef]] = []
    if proxy and proxy.pod.runs:
        containers.append(nullcontext(proxy.target))
    if access.debug_pods:
        containers.append(access.debug_pods.on(node.name))
    found: NodeState | UnknownNode = _without_container(node, proxy, other)
    if not containers and not proxy and not other:
        return _with_images(access.client, node)
    for container in containers:
        try:
            with container as opened:
                return _read(access.client, node, opened, proxy, other, question)
        except NotInImage as failure:
            found = UnknownNode(node, f"{failure}; use --debug-image IMAGE with an image that has it")
        except (Failure, InvalidSave) as failure:
            return UnknownNode(node, str(failure))
    return found


def _without_container(node: Node, proxy: ProxyPod | None, other: str) -> UnknownNode:
    """Return why a node has no container that can print its tables."""
    if proxy:
        state = "being deleted" if proxy.pod.deleting else proxy.pod.phase
        problem = proxy.container.problem or proxy.pod.reason
        reason = f"pod {proxy.pod} is {state}{f' ({problem})' if problem else ''}"
        return UnknownNode(node, f"{reason}; use --debug-image IMAGE to read the rules without it")
    if other:
        return UnknownNode(node, f"runs {other} and no kube-proxy", by_design=True)
    return UnknownNode(node, _NO_POD)


def _with_images(client: Client, node: Node) -> UnknownNode:
    """Return a node without a pod of a proxy, with the images that it holds for --debug-image."""
    try:
        images = [one_line(image) for image in node_images(client, node.name)]
    except Failure:
        images = []
    likely = [image for part in _WITH_IPTABLES for image in images if part in image]
    named = listed([*dict.fromkeys(likely)][:_MOST_IMAGES])
    return UnknownNode(node, f"{_NO_POD}{f'; the node holds {named}' if named else ''}")


def _read(
    client: Client,
    node: Node,
    container: ContainerRef,
    proxy: ProxyPod | None,
    other: str,
    question: Question,
) -> NodeState | UnknownNode:
    """Read the tables, and tell the proxy's mode by them. Raises Failure and InvalidSave."""
    printed = _printed_tables(client, container)
    used = tables_in_use(printed.tables)
    if any(_runs_ipvs(table.ruleset) for table in used.tables):
        return _in_other_mode(node, "ipvs", proxy)
    rules = {
        table.ruleset.family: NodeRules(table.ruleset, table.counters, table.backend) for table in used.tables
    }
    served = any(NAT_SERVICES in table.ruleset.chains for table in used.tables)
    native: Mapping[Family, NftRuleset] = {}
    without_nft = ""
    if question.firewalls or (question.nftables and not served):
        try:
            native = _nftables(client, container, used.tables, question)
        except NotInImage:
            # Without the name of the pod, notes about many nodes are one.
            without_nft = "the image of its pod has no nft" if question.firewalls else ""
    for family, ruleset in native.items():
        if ruleset.chains:
            known = rules.get(family, NodeRules(Ruleset(family, {})))
            rules[family] = msgspec.structs.replace(known, nftables=ruleset)
    if served or any(one.in_nftables_mode for one in rules.values()):
        printed_proc = _proc(client, container) if question.firewalls else ""
        return NodeState(
            node=node,
            origin=Origin(
                f"rules of node {node.name}", f"on node {node.name}", _title(proxy), str(container)
            ),
            rules=rules,
            network=NodeNetwork(frozenset(node.addresses), tuple(proc_routes.parse_routes(printed_proc))),
            conntrack_failures=proc_routes.parse_failures(printed_proc),
            other_backend=used.other,
            unread={unread_rules(family): reason for family, reason in printed.unread.items()}
            | ({UNREAD_NFTABLES: without_nft} if without_nft else {}),
            remarks=(*remarks(printed.unread, used.other, without_nft), *nftables_remarks(native.values())),
            flows=_flow_table(client, container) if question.flows else None,
        )
    if not question.nftables and _has_nftables_proxy(client, container):
        return _in_other_mode(node, "nftables", proxy)
    if other:
        return UnknownNode(node, f"runs {other} and has no rules of kube-proxy", by_design=True)
    advice = f"; run `kubectl logs -n {proxy.pod.namespace} {proxy.pod.name}`" if proxy else ""
    return UnknownNode(node, f"no service-proxy rules{advice}")


def remarks(unread: Mapping[Family, str], other: str, without_nft: str = "") -> Sequence[str]:
    """Say what the tables do not show.

    `other` is the other backend, if it has service-proxy rules too, and `without_nft` why tables of nftables are unread.
    """
    remarks = [f"{family.value} rules could not be read: {reason}" for family, reason in unread.items()]
    if other:
        remarks.append(f"the {other} tables have service-proxy rules too, and packets pass both")
    if without_nft:
        remarks.append(f"tables of nftables could not be read: {without_nft}")
    return remarks


def _in_other_mode(node: Node, mode: str, proxy: ProxyPod | None) -> UnknownNode:
    return UnknownNode(node, f"runs {_title(proxy)} in {_OTHER_MODES[mode]} mode", True, mode)


def _title(proxy: ProxyPod | None) -> str:
    return str(proxy) if proxy else "a proxy without a pod"


class _PrintedTables(NamedTuple):
    """The tables that programs of a pod print.

    - `unread`: why the tables of a family are missing
    - `legacy_too`: iptables-nft-save warns about tables of the legacy backend
    """

    tables: tuple[SavedTables, ...]
    unread: Mapping[Family, str]
    legacy_too: bool = False


def _printed_tables(client: Client, container: ContainerRef) -> _PrintedTables:
    """Return the tables of a node: of both backends, unless one serves it and the other is empty.

    Raises Failure if no family can be read, NotInImage without iptables-save, InvalidSave for other output.
    """
    try:
        nft = _save(client, container, "nft-save")
    except NotInImage:
        # An image with one backend, which its iptables-save reads.
        return _save(client, container, "save")
    if any(NAT_SERVICES in table.ruleset.chains for table in nft.tables) and not nft.legacy_too:
        return nft
    try:
        legacy = _save(client, container, "legacy-save")
    except NotInImage:
        return nft
    return _PrintedTables((*nft.tables, *legacy.tables), {**legacy.unread, **nft.unread})


def _runs_ipvs(ruleset: Ruleset) -> bool:
    return any(_IPVS in rule for rule in ruleset.chains.get(NAT_SERVICES, ()))


def _has_nftables_proxy(client: Client, container: ContainerRef) -> bool:
    """Return whether a node has the tables of kube-proxy's nftables mode; False if the image has no nft.

    Raises Failure.
    """
    try:
        tables = run_in_pod(client, container, ("nft", "list", "tables")).output
    except NotInImage:
        return False
    return any(line.split()[-1:] == [b"kube-proxy"] for line in tables.splitlines())


def _nftables(
    client: Client, container: ContainerRef, iptables: Sequence[SavedTables], question: Question
) -> Mapping[Family, NftRuleset]:
    """Return the tables of nftables by family. Raises NotInImage, Failure, InvalidSave."""
    of_iptables = {name for table in iptables if table.backend == "nft" for name in table.ruleset.tables()}
    listing = run_in_pod(client, container, ("nft", "list", "tables")).output.decode()
    texts = []
    for _, family, name in (line.split() for line in listing.splitlines()):
        if f"{family} {name}" in NFT_TABLES or (
            question.firewalls and family != "arp" and not (family in ("ip", "ip6") and name in of_iptables)
        ):
            command = ("nft", "-j", "list", "table", family, name)
            printed = run_in_pod(client, container, command, silence=_SILENCE)
            if printed.exit_code:
                raise Failure(f"`{' '.join(command)}` in pod {container} failed: {one_line(printed.errors)}")
            texts.append(printed.output)
    return read_nft_lists(texts, f"nft in pod {container}")


def _proc(client: Client, container: ContainerRef) -> str:
    """Return what proc_routes reads; "" if the pod has no program that prints it."""
    try:
        printed = run_in_pod(client, container, proc_routes.COMMAND, silence=_SILENCE)
    except Failure:
        return ""
    return printed.output.decode(errors="replace")


def _flow_table(client: Client, container: ContainerRef) -> FlowTable:
    try:
        return parse_flow_table(*print_flows(client, container))
    except Failure as failure:
        return FlowTable(unread=f"{failure}; use --debug-image IMAGE with pykubeproxy or conntrack")


def print_flows(client: Client, container: ContainerRef) -> tuple[str, str, str]:
    """Return the lines of a node that `parse_flow_table` reads, and why flows or affinity lists are missing, else "".

    The first programs that the pod has print them. Raises Failure if it has none.
    """
    failures: list[Failure] = []
    for commands in _FLOW_COMMANDS:
        try:
            texts = [_printed(client, container, command) for command in commands]
        except Failure as failure:
            failures.append(failure)
            continue
        if commands is _FLOW_COMMANDS[0]:
            return texts[0], "", ""
        try:
            # Without a client in the lists, grep ends with 1.
            return "\n".join((*texts, _printed(client, container, _RECENT_COMMAND, 1))), "", ""
        except Failure as failure:
            return "\n".join(texts), "", str(failure)
    raise failures[-1]


def _printed(client: Client, container: ContainerRef, command: Sequence[str], success: int = 0) -> str:
    """Return what a command prints. Raises Failure."""
    printed = run_in_pod(client, container, command, silence=_SILENCE)
    if printed.exit_code not in (0, success):
        raise Failure(f"`{' '.join(command)}` in pod {container} failed: {one_line(printed.errors)}")
    return printed.output.decode(errors="replace")


def _save(client: Client, container: ContainerRef, program: str) -> _PrintedTables:
    """Run a program such as "nft-save" for both families. The kernel of a node may lack one."""
    files: list[SavedFile] = []
    unread: dict[Family, str] = {}
    legacy_too = False
    for family, prefix in _PREFIX.items():
        name = f"{prefix}-{program}"
        saved = run_in_pod(client, container, (name, "-c"), silence=_SILENCE)
        if saved.exit_code:
            reason = one_line(saved.errors) or "no message"
            unread[family] = f"{name} exited with status {saved.exit_code}: {reason}"
            continue
        text = saved.output.decode(errors="surrogateescape")
        legacy_too |= _LEGACY_TOO in text + saved.errors
        if "\n*" in text or text.startswith("*"):
            files.append(SavedFile(f"{name} in pod {container}", text))
    if len(unread) == len(_PREFIX):
        raise Failure(f"cannot read the rules in pod {container}: {next(iter(unread.values()))}")
    return _PrintedTables(read_saves(files), unread, legacy_too)


class _RaisedError(NamedTuple):
    """An error of the function, to raise on the caller's thread."""

    error: Exception


def side_by_side(
    function: Callable[[_Item], _Result], items: Sequence[_Item], at_once: int
) -> Iterator[_Result]:
    """Yield the result for each item in the order in which they are ready; raise what the function raises.

    At most `at_once` calls run, or wait for the caller to take their results. When the caller stops, running calls are
    abandoned: their threads do not keep the program alive.
    """
    todo: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for item in items:
        todo.put(item)
    done: queue.SimpleQueue[_Result | _RaisedError] = queue.SimpleQueue()
    slots = threading.Semaphore(at_once)
    stopped = threading.Event()

    def work() -> None:
        while True:
            slots.acquire()
            try:
                item = todo.get_nowait()
            except queue.Empty:
                return
            if stopped.is_set():
                return
            try:
                done.put(function(item))
            except Exception as error:
                done.put(_RaisedError(error))

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=work, daemon=True, name="node-reader").start()
    try:
        for _ in items:
            result = done.get()
            slots.release()
            if isinstance(result, _RaisedError):
                raise result.error
            yield result
    finally:
        stopped.set()
        for _ in range(at_once):
            slots.release()
