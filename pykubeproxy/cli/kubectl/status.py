"""`kubectl pykubeproxy status`: show which proxy runs on each node, and its health."""

import time
from collections.abc import Sequence

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.agent.observe.status import Status, decode
from pykubeproxy.agent.observe.status_text import all_well, duration, health
from pykubeproxy.cli.flags import output_option
from pykubeproxy.cli.help import command
from pykubeproxy.cli.kubectl.access import list_nodes, node_access, on_each_node, open_client
from pykubeproxy.cli.kubectl.arguments import NodeSelection, PodOptions, ServerOptions
from pykubeproxy.cli.kubectl.options import node_options, pod_options, server_options
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_styled
from pykubeproxy.remote import ReadNode, UnreadNode, find_node_pods
from pykubeproxy.remote.states import ProxyState, proxy_state
from pykubeproxy.sources import SourceError
from pykubeproxy.wording import SafeText, one_line, styled, text_of, wrapped

_HEADER = ("NODE", "PROXY", "MODE", "STATE", "RESTARTS", "SINCE")


class _Row(msgspec.Struct, frozen=True):
    """The state of one node's proxy; `problem` is what is wrong, or ""."""

    state: ProxyState
    agent: Status | None
    problem: str

    @property
    def notes(self) -> Sequence[str]:
        """What to know about rules that are not read, without a fault."""
        match self.state.read:
            case UnreadNode(other_proxy=True, mode="", reason=reason):
                return [f"It {reason}."]
            case ReadNode(unread=unread):
                return [
                    f"{family.value} rules could not be read: {reason}" for family, reason in unread.items()
                ]
        return ()


@command(
    short_help="Show which proxy runs on each node, and its health.",
    exit_codes={0: "Nothing is wrong.", 1: "Something is wrong on a node.", 2: "Wrong usage or a failure."},
)
@output_option
@node_options
@server_options
@pod_options
@click_errors(SourceError)
def status(output: str, server: ServerOptions, nodes: NodeSelection, pods: PodOptions) -> None:
    """Show the proxy of each node: its version, mode and backend, restarts, and what is wrong with it.

    For pykubeproxy, this shows the health that its agent reports. For kube-proxy, it shows the state of its pod, and
    whether it has written rules; use diff to see whether they are up to date.

    \b
    kubectl pykubeproxy status --all-nodes
    kubectl pykubeproxy status --node node1 -o json
    """
    client = open_client(server)
    wanted = list_nodes(client, nodes)
    with node_access(client, pods) as access:
        proxies = find_node_pods(access, wanted)
        states = on_each_node(
            lambda node: proxy_state(access, node, proxies, "status"), wanted, pods, "Reading nodes"
        )
    rows = sorted(map(_row, states), key=lambda it: it.state.node.name)
    if output == "json":
        echo_json(document(rows))
    else:
        echo_styled(_table(rows))
    if any(it.problem for it in rows):
        raise SystemExit(1)


def _row(state: ProxyState) -> _Row:
    if not state.answer:
        return _Row(state, None, _problem(state))
    try:
        agent = decode(state.answer)
    except ValueError as error:
        return _Row(state, None, f"its agent is of another version: {error}")
    return _Row(state, agent, "" if all_well(agent) else health(agent))


def _problem(state: ProxyState) -> str:
    """Return what the pod and the rules show to be wrong; "" for nothing."""
    if state.failure:
        return state.failure
    if isinstance(state.read, UnreadNode):
        return "" if state.read.other_proxy else state.read.reason
    if state.proxy and not state.proxy.container.ready:
        problem = state.proxy.container.problem
        return f"pod {state.proxy.pod} is not ready{f': {problem}' if problem else ''}"
    if state.read and state.read.other_backend:
        return f"the {state.read.other_backend} tables have service-proxy rules too, and packets pass both"
    return ""


def _table(rows: Sequence[_Row]) -> SafeText:
    now = time.time()
    cells = [_HEADER, *(tuple(map(one_line, _cells(it, now))) for it in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEADER))]
    lines = []
    for row, it in zip(cells, (None, *rows), strict=True):
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        lines.append(styled(line, "red") if it and it.problem else line)
        for note in filter(None, (it.problem, *it.notes)) if it else ():
            lines += wrapped(note, "    ")
    return text_of(lines)


def _cells(row: _Row, now: float) -> tuple[str, ...]:
    state = row.state
    if not state.proxy:
        return state.node.name, "none", state.mode or "unknown", "no pod", "", ""
    container = state.proxy.container
    since = duration(max(0.0, now - container.running_since)) if container.running_since else ""
    return (
        state.node.name,
        str(state.proxy),
        _mode(row),
        _state(row),
        str(container.restarts),
        since,
    )


def _mode(row: _Row) -> str:
    backend = row.agent.backend if row.agent else row.state.backend
    return f"{row.state.mode} ({backend})" if backend else row.state.mode or "unknown"


def _state(row: _Row) -> str:
    proxy = row.state.proxy
    assert proxy
    if row.agent:
        return "healthy" if not row.problem else "not healthy"
    if not proxy.pod.runs:
        return "deleting" if proxy.pod.deleting else proxy.pod.phase.lower()
    return "ready" if proxy.container.ready else "not ready"


def document(rows: Sequence[_Row]) -> dict[str, object]:
    """The proxies of nodes as a JSON document of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1",
     "healthy": true if nothing is wrong on any node,
     "nodes": [{"node": its name,
                "proxy": "pykubeproxy"|"kube-proxy"|the name of a container, "" without a pod,
                "version": the tag of its image, "pod": NAMESPACE/NAME, "phase": that of the pod,
                "ready": true or false, "restarts": number, "runningSince": seconds since 1970, or null,
                "mode": "iptables"|"ipvs"|"nftables"|"kernelspace", "" if unknown,
                "backend": "nft"|"legacy", "" if unknown,
                "problem": what is wrong, "" for nothing, "notes": [what is no fault],
                "agent": what `pykubeproxy status -o json` prints there, null for other proxies}]}

    Nodes are ordered by name. Keys may be added.
    """
    return {
        "apiVersion": API_VERSION,
        "healthy": not any(it.problem for it in rows),
        "nodes": [_entry(it) for it in rows],
    }


def _entry(row: _Row) -> dict[str, object]:
    proxy = row.state.proxy
    return {
        "node": row.state.node.name,
        "proxy": proxy.proxy if proxy else "",
        "version": proxy.version if proxy else "",
        "pod": str(proxy.pod) if proxy else "",
        "phase": proxy.pod.phase if proxy else "",
        "ready": bool(proxy and proxy.container.ready),
        "restarts": proxy.container.restarts if proxy else 0,
        "runningSince": proxy.container.running_since if proxy else None,
        "mode": row.state.mode,
        "backend": row.agent.backend if row.agent else row.state.backend,
        "problem": row.problem,
        "notes": list(row.notes),
        "agent": msgspec.json.decode(row.state.answer) if row.agent else None,
    }
