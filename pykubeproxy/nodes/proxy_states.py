"""What the proxies of a cluster's nodes show to `status` and `check`: ask our agents, look at others from outside."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.check import from_outside
from pykubeproxy.inspect.check.firewalls import firewalls
from pykubeproxy.inspect.check.migration import IPVS, Migration, migration
from pykubeproxy.inspect.check.report import (
    Check,
    CheckedNode,
    CheckReport,
    Finding,
    Level,
    check_report,
    checked_node,
)
from pykubeproxy.inspect.node import UNREAD_NFTABLES, NodeState, Question, UnknownNode, unread_rules
from pykubeproxy.inspect.status import ProxyStatus, StatusReport, agent_status, status_report
from pykubeproxy.nodes.cluster import NodeAccess, NodePods, on_each_node, read_node
from pykubeproxy.nodes.proxies import ProxyPod
from pykubeproxy.objects import Family, Kind, Node, Service
from pykubeproxy.sources import Client
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.pods import run_in_pod
from pykubeproxy.sources.queries import list_kind, server_version
from pykubeproxy.wording import one_line


class _AnswerForm(msgspec.Struct, rename="camel"):
    api_version: str = ""


_Answer = TypeVar("_Answer", StatusReport, CheckReport)


class ProxyState(msgspec.Struct, Generic[_Answer], frozen=True):
    """The proxy of one node.

    - `proxy`: None without a pod
    - `read`: the outcome of reading the rules; None for our agents, which are asked instead
    - `answer`: the report of the agent, which has this node; None without one
    - `failure`: why there is none, although there is an agent
    """

    node: Node
    proxy: ProxyPod | None
    read: NodeState | UnknownNode | None = None
    answer: _Answer | None = None
    failure: str = ""

    @property
    def mode(self) -> str:
        """The mode of the proxy: "iptables", "ipvs", "nftables" or "kernelspace"; "" if unknown."""
        if isinstance(self.read, UnknownNode):
            return self.read.mode
        return "nftables" if self.read and self.read.in_nftables_mode else "iptables"

    @property
    def backend(self) -> str:
        """The backend of the rules, "nft" or "legacy", or ""."""
        rules = self.read.rules if isinstance(self.read, NodeState) else {}
        return next((node_rules.backend for node_rules in rules.values()), "")


def _proxy_state(
    access: NodeAccess,
    node: Node,
    pods: NodePods,
    command: str,
    kind: type[_Answer],
    options: Sequence[str] = (),
) -> ProxyState[_Answer]:
    """Return the state of the proxy of a node; our agents are asked with a command such as "status" and its options."""
    proxy = pods.proxy(node)
    if proxy is None or not proxy.ours or not proxy.pod.runs:
        return ProxyState(
            node,
            proxy,
            read_node(access, node, pods, question=Question(nftables=True, firewalls=True)),
        )
    try:
        answer = run_in_pod(access.client, proxy.target, ("pykubeproxy", command, *options, "-o", "json"))
        if answer.output.lstrip().startswith(b"{"):
            return ProxyState(node, proxy, answer=_decoded(answer.output, kind))
    except Failure as failure:
        return ProxyState(node, proxy, failure=str(failure))
    reason = one_line(answer.errors) or f"exit status {answer.exit_code}"
    return ProxyState(node, proxy, failure=f"`pykubeproxy {command}` in pod {proxy.pod} failed: {reason}")


def _decoded(answer: bytes, kind: type[_Answer]) -> _Answer:
    """Return the report that an agent printed, which has its node. Raises Failure."""
    try:
        found = msgspec.json.decode(answer, type=kind)
        if not found.nodes:
            raise ValueError("its report has no node")
        if (version := msgspec.json.decode(answer, type=_AnswerForm).api_version) != API_VERSION:
            raise ValueError(f"its API version is {version}, not {API_VERSION}")
    except (ValueError, RecursionError) as error:
        raise Failure(f"its agent is of another version: {one_line(str(error))}") from None
    return found


def cluster_status(access: NodeAccess, nodes: Sequence[Node], advance: Callable[[], None]) -> StatusReport:
    """Return the proxies of nodes. Raises ReadError."""
    states = on_each_node(
        access, lambda node, pods: _proxy_state(access, node, pods, "status", StatusReport), nodes, advance
    )
    return status_report(map(_status, states), time.time())


def _status(state: ProxyState[StatusReport]) -> ProxyStatus:
    agent = state.answer.nodes[0].agent if state.answer else None
    problem = _problem(state)
    if state.answer and not agent:
        problem = "its agent says nothing about itself"
    if not state.proxy:
        return ProxyStatus(
            node=state.node.name, mode=state.mode, state="no pod", problem=problem, notes=_notes(state)
        )
    known = agent_status(agent) if agent else None
    container, pod = state.proxy.container, state.proxy.pod
    return ProxyStatus(
        node=state.node.name,
        proxy=state.proxy.proxy,
        version=state.proxy.version,
        pod=str(pod),
        phase=pod.phase,
        ready=container.ready,
        restarts=container.restarts,
        running_since=container.running_since,
        mode=state.mode,
        backend=known.backend if known else state.backend,
        state=known.state if known and (known.problem or container.ready) else _word(state),
        problem=(known.problem if known else "") or problem,
        notes=_notes(state),
        agent=agent,
    )


def _word(state: ProxyState[StatusReport]) -> str:
    if not state.proxy:
        return "no pod"
    if not state.proxy.pod.runs:
        return "deleting" if state.proxy.pod.deleting else state.proxy.pod.phase.lower()
    return "ready" if state.proxy.container.ready else "not ready"


def _problem(state: ProxyState[StatusReport]) -> str:
    """Return what the pod and the rules show to be wrong; "" for nothing."""
    if state.failure:
        return state.failure
    if isinstance(state.read, UnknownNode):
        return "" if state.read.by_design else state.read.reason
    if state.proxy and not state.proxy.container.ready:
        problem = state.proxy.container.problem
        return f"pod {state.proxy.pod} is not ready{f': {problem}' if problem else ''}"
    if state.read and state.read.other_backend:
        return f"the {state.read.other_backend} tables have service-proxy rules too, and packets pass both"
    return ""


def _notes(state: ProxyState[StatusReport]) -> tuple[str, ...]:
    """Return harmless reasons why rules were not read, and rules of nftables that stop packets to Services."""
    match state.read:
        case UnknownNode(by_design=True, mode="", reason=reason):
            return (f"It {reason}.",)
        case NodeState(rules=rules, unread=unread, network=network):
            unread_families = ((key, reason) for key, reason in unread.items() if key != UNREAD_NFTABLES)
            found = (
                one for family, of_family in rules.items() for one in firewalls(family, of_family, network)
            )
            return (
                *(f"{what} could not be read: {reason}" for what, reason in unread_families),
                *(one.message for one in found if one.level is Level.WARN),
            )
    return state.answer.nodes[0].notes if state.answer else ()


def check_cluster(
    access: NodeAccess,
    nodes: Sequence[Node],
    advance: Callable[[], None],
    wanted: Migration | None = None,
) -> tuple[CheckReport, bool]:
    """Return the findings about nodes, or about their change to another mode, and whether a node could not be read.

    Raises ReadError, SourceError.
    """
    options: tuple[str, ...] = ()
    if wanted:
        options = ("--migrate-to", wanted.to)
        if wanted.node_port_addresses:
            options += ("--nodeport-addresses", ",".join(wanted.node_port_addresses))
    asked = on_each_node(
        access,
        lambda node, pods: _proxy_state(access, node, pods, "check", CheckReport, options),
        nodes,
        advance,
    )
    server = "" if wanted else _server_version(access.client)
    checked: list[CheckedNode] = []
    unread = False
    # Rules of all nodes at once would take much memory.
    for state in asked:
        unread |= _is_unread(state)
        if wanted and state.mode == IPVS and not wanted.services:
            services = list_kind(access.client, Kind.SERVICE).objects
            wanted = replace(wanted, services=[one for one in services if isinstance(one, Service)])
        checked.append(_migrating(state, wanted) if wanted else _checked(state, server))
    return check_report(checked), unread


def _migrating(state: ProxyState[CheckReport], wanted: Migration) -> CheckedNode:
    findings: list[Finding] = []
    if state.answer:
        findings += state.answer.nodes[0].checks
    if state.read:
        findings += migration(wanted, replace(state.read, node=state.node))
    if state.failure:
        findings.append(from_outside.unread(state.failure))
    proxy = state.proxy
    return checked_node(
        state.node.name,
        findings,
        proxy=str(proxy) if proxy else "",
        pod=str(proxy.pod) if proxy else "",
        backend=state.backend,
        migrate_to=wanted.to,
    )


def _is_unread(state: ProxyState[CheckReport]) -> bool:
    unread = isinstance(state.read, UnknownNode) and not state.read.by_design
    return unread or bool(state.failure)


def _server_version(client: Client) -> str:
    """Return the version of the API server, "" if it does not tell."""
    try:
        return server_version(client)
    except Failure:
        return ""


def _checked(state: ProxyState[CheckReport], server: str) -> CheckedNode:
    proxy = state.proxy
    return checked_node(
        state.node.name,
        (state.answer and state.answer.nodes[0].checks) or tuple(_findings(state, server)),
        proxy=str(proxy) if proxy else "",
        pod=str(proxy.pod) if proxy else "",
        backend=state.backend,
    )


def _findings(state: ProxyState[CheckReport], server: str) -> Iterator[Finding]:
    proxy, read = state.proxy, state.read
    if proxy:
        yield from_outside.pod(str(proxy), proxy.pod, proxy.container)
        if not proxy.ours:
            yield from_outside.version(proxy.version, server)
    match read:
        case NodeState():
            if read.in_nftables_mode:
                yield from_outside.other_mode(f"runs {proxy or 'a proxy without a pod'} in nftables mode")
            else:
                rulesets = [node_rules.ruleset for node_rules in read.rules.values()]
                yield from from_outside.tables(rulesets, state.backend, read.other_backend)
            for family, rules in read.rules.items():
                yield from firewalls(family, rules, read.network)
            if reason := read.unread.get(UNREAD_NFTABLES):
                yield Check("firewall").skip(f"tables of nftables could not be read: {reason}")
            for family in Family:
                if reason := read.unread.get(unread_rules(family)):
                    yield from_outside.unread(reason, family)
        case UnknownNode(by_design=True):
            yield from_outside.other_mode(read.reason)
        case UnknownNode():
            yield from_outside.unread(read.reason) if proxy else from_outside.no_pod(read.reason)
    if state.failure:
        yield from_outside.unread(state.failure)
