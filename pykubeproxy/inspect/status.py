"""What `status` answers: the proxy of 1 to n nodes, and its health."""

from collections.abc import Iterable, Iterator

import msgspec

from pykubeproxy.pages.status_text import all_well, blocks, health, wide_blocks
from pykubeproxy.pages.statusz import AgentStatus
from pykubeproxy.report.document import Report
from pykubeproxy.report.text import GAP, Block, Heading, Row, Sentence, Table
from pykubeproxy.wording import duration, natural


class ProxyStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Which proxy a node has, and how it is.

    - `node`: its name
    - `proxy`: "pykubeproxy", "kube-proxy" or the name of a container; "" without a pod
    - `version`: of our agent, else the tag of the image; "" if unknown
    - `pod`: NAMESPACE/NAME, "" if unknown
    - `phase`: that of the pod, "" without one
    - `ready`: the pod is ready, or our agent if it was asked directly
    - `restarts`: of the container; null if unknown
    - `running_since`: in seconds since 1970; null if unknown
    - `mode`: "iptables", "ipvs", "nftables" or "kernelspace"; "" if unknown
    - `backend`: "nft" or "legacy"; "" if unknown
    - `state`: a word or two, such as "healthy", "not ready", "no pod"
    - `problem`: what is wrong, "" for nothing
    - `notes`: what is worth knowing and no fault
    - `agent`: what our agent says about itself, as /statusz has it; null for other proxies
    """

    node: str
    proxy: str = ""
    version: str = ""
    pod: str = ""
    phase: str = ""
    ready: bool = False
    restarts: int | None = None
    running_since: float | None = None
    mode: str = ""
    backend: str = ""
    state: str = ""
    problem: str = ""
    notes: tuple[str, ...] = ()
    agent: AgentStatus | None = None


class StatusReport(Report, frozen=True):
    """The health of the proxy on each node.

    - `healthy`: nothing is wrong on any node
    - `time`: when the nodes were asked, in seconds since 1970
    - `nodes`: one entry for each node, ordered by name
    """

    healthy: bool
    time: float
    nodes: tuple[ProxyStatus, ...]

    def blocks(self, *, wide: bool) -> Iterator[Block]:
        """Return all about an agent that was asked directly, else a row for each node.

        `wide` adds pods, all about agents, and their times, tables and every record that they keep.
        """
        in_table = any(node.pod or not node.agent for node in self.nodes)
        if in_table:
            yield _table(self.nodes, self.time, wide=wide)
            if not wide:
                return
        for one in self.nodes:
            if one.agent:
                yield GAP
                yield from () if in_table else map(Sentence, one.notes)
                up = duration(max(0.0, one.agent.now - one.agent.started))
                about = f"  {one.agent.version}, backend {one.agent.backend}, up {up}"
                yield Heading(one.agent.node, rest=about)
                yield from wide_blocks(one.agent) if wide else blocks(one.agent)

    def names(self) -> Iterable[str]:
        """Return the nodes with a problem."""
        return [f"node/{node.node}" for node in self.nodes if node.problem]


def status_report(nodes: Iterable[ProxyStatus], time: float) -> StatusReport:
    """Return the report about nodes that were asked at a time."""
    ordered = tuple(sorted(nodes, key=lambda status: natural(status.node)))
    return StatusReport(healthy=not any(status.problem for status in ordered), time=time, nodes=ordered)


def agent_status(agent: AgentStatus) -> ProxyStatus:
    """Return the status of a node whose agent was asked directly."""
    problem = "" if all_well(agent) else health(agent)
    return ProxyStatus(
        node=agent.node,
        proxy="pykubeproxy",
        version=agent.version,
        ready=agent.ready,
        running_since=agent.started,
        mode="iptables",
        backend=agent.backend,
        state="not healthy" if problem else "healthy",
        problem=problem,
        agent=agent,
    )


def _table(nodes: Iterable[ProxyStatus], now: float, *, wide: bool) -> Table:
    rows = []
    for node in nodes:
        since = duration(max(0.0, now - node.running_since)) if node.running_since else ""
        mode = f"{node.mode} ({node.backend})" if node.backend else node.mode or "unknown"
        proxy = f"{node.proxy} {node.version}".strip() or "none"
        restarts = "" if node.restarts is None else str(node.restarts)
        below: list[Block] = [Sentence(note) for note in node.notes]
        if node.problem:
            below.insert(0, Sentence(node.problem, "bad"))
        rows.append(
            Row(
                (node.node, proxy, mode, node.state, restarts, since, *([node.pod] if wide else [])),
                "bad" if node.problem else "",
                tuple(below),
            )
        )
    header = ("NODE", "PROXY", "MODE", "STATE", "RESTARTS", "UP", *(["POD"] if wide else []))
    return Table(rows, header, frozenset([4]))
