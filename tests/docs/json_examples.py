"""Examples of JSON documents for the reference: what commands answer about a recorded node, and reports made of values."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from click.testing import CliRunner

from pykubeproxy.cli import main
from pykubeproxy.inspect.check.report import CheckReport, check_report, checked_node
from pykubeproxy.inspect.check.this_node import privileges, reverse_path
from pykubeproxy.inspect.cleanup import CleanedChain, CleanedTables, CleanupReport, RemovedJump
from pykubeproxy.inspect.connection import Location, LocationKind, TracedDestination
from pykubeproxy.inspect.flows import Flow, FlowSide
from pykubeproxy.inspect.status import agent_status, status_report
from pykubeproxy.inspect.trace.journey import EndResult, TracedEnd, TracedVisit, TracedWay
from pykubeproxy.inspect.trace.live import LiveTraceReport, compare
from pykubeproxy.inspect.trace.observed import Listening, NodeView, Observations, RuleRise
from pykubeproxy.inspect.trace.report import report
from pykubeproxy.kernel.hits import RuleHit
from pykubeproxy.kernel.probes import Probe, ProbeOutcome
from pykubeproxy.lab.report import (
    DemoReport,
    HostState,
    LabPort,
    LabReport,
    LabsReport,
    LogEntry,
    RunningLab,
    ScenarioResult,
    ServiceState,
    scenarios_report,
)
from pykubeproxy.lab.scenarios import SCENARIOS
from pykubeproxy.objects import Family, Protocol
from pykubeproxy.pages.statusz import AgentStatus, FamilyStatus, SyncRecord
from pykubeproxy.report.document import Report, document
from pykubeproxy.rules.removal import removal
from tests.cases import expected, load_case, saved_text
from tests.fakes.bundles import NODE, files_of, sections_of, written

# Columns of a line, entries of a list and characters of a text.
_WIDTH, _ENTRIES, _TEXT = 100, 2, 200
_NOW = 1_795_218_836.0
# What a bundle of the node answers: its rules are those of one case, its objects those of another.
_LOGS = "/run/pykubeproxy-lab/lab/logs"
_NODE_FILE, _OLD_FILE = "node1.tar.gz", "old.tar.gz"
_COMMANDS = {
    "Dump": f"dump-rules ns1/web --bundle {_NODE_FILE}",
    "Explain": f"explain ns1/web --bundle {_NODE_FILE}",
    "Diff": f"diff --bundle {_OLD_FILE} --family ipv4",
    "Trace": f"trace 10.244.1.9 svc/ns1/web --bundle {_NODE_FILE}",
    "Render": "render -f web.yaml --hostname-override node1 --family ipv4",
}
_WEB = """
{kind: Service, apiVersion: v1, metadata: {name: web, namespace: default},
 spec: {clusterIP: 10.96.1.1, clusterIPs: [10.96.1.1], ports: [{port: 80, protocol: TCP}]}}
"""


def examples() -> dict[str, tuple[str, str]]:
    """Return an example of each kind of report: the command, and its JSON."""
    made: dict[str, tuple[str, Report]] = {
        "Status": ("status", status_report([agent_status(_agent())], time=_NOW)),
        "Check": ("check", _checked()),
        "Cleanup": ("cleanup", _cleaned()),
        "LiveTrace": ("trace --live 10.244.1.9 10.244.2.2:8080", _live()),
        "Lab": ("lab status", _lab()),
        "Labs": ("lab list", LabsReport(labs=(RunningLab("lab", 2960, 4, _LOGS),))),
        "Demo": ("lab demo refused", _demo()),
        "Scenarios": ("lab demo --list", scenarios_report(SCENARIOS)),
    }
    found = {kind: (command, _laid_out(_cut(document(report)))) for kind, (command, report) in made.items()}
    with _folder():
        for kind, command in _COMMANDS.items():
            result = CliRunner().invoke(main, [*command.split(), "-o", "json"])
            assert result.exit_code in (0, 1), result.output
            found[kind] = command, _laid_out(_cut(json.loads(result.stdout)))
    return found


def _cut(value: object) -> object:
    """Return a document with short lists and texts."""
    if isinstance(value, dict):
        return {key: _cut(item) for key, item in value.items()}
    if isinstance(value, str) and len(value) > _TEXT:
        return f"{value[:_TEXT]}…"
    return [_cut(item) for item in value[:_ENTRIES]] if isinstance(value, list | tuple) else value


def _laid_out(value: object, indent: int = 0) -> str:
    """Return JSON with values on one line if they fit."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, list | dict) or len(line) + indent <= _WIDTH:
        return line
    pad, ends = "\n" + " " * (indent + 2), "[]"
    parts = [_laid_out(item, indent + 2) for item in value]
    if isinstance(value, dict):
        ends = "{}"
        parts = [f"{json.dumps(key)}: {_laid_out(item, indent + 2)}" for key, item in value.items()]
    return f"{ends[0]}{pad}{f',{pad}'.join(parts)}\n{' ' * indent}{ends[1]}"


@contextmanager
def _folder() -> Iterator[None]:
    """Make the current folder one with the files of the commands."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            for file, objects, rules in (
                (_NODE_FILE, "notready-skipped", "notready-skipped"),
                (_OLD_FILE, "clusterip-one", "clusterip-three"),
            ):
                tables = files_of({family: saved_text(rules, family) for family in Family})
                Path(file).write_bytes(written(sections_of(objects, tables)))
            Path("web.yaml").write_text(_WEB)
            yield
        finally:
            os.chdir(before)


def _agent() -> AgentStatus:
    return AgentStatus(
        version="0.1.0",
        node=NODE,
        backend="nft",
        started=_NOW - 93_784,
        now=_NOW,
        healthy=True,
        ready=True,
        alive=True,
        node_eligible=True,
        families=(FamilyStatus("IPv4", False, _NOW - 3, 1, 2, {"filter": 7, "nat": 24}),),
        syncs=(SyncRecord(_NOW - 3, "IPv4", full=False, seconds=0.019, rules=3),),
    )


def _checked() -> CheckReport:
    findings = [
        privileges(frozenset(("CAP_NET_ADMIN", "CAP_NET_RAW"))),
        reverse_path({"eth0": "1", "eth1": "1"}),
    ]
    return check_report([checked_node(NODE, findings, backend="nft", configuration="the agent's")])


def _cleaned() -> CleanupReport:
    found = removal(expected(load_case("clusterip-one"), Family.IPV4))
    tables = CleanedTables(
        "nft",
        Family.IPV4,
        jumps=[RemovedJump(*key, rule) for key, rule in found.jumps],
        chains=[CleanedChain(*key) for key in found.deleted],
        input=found.restore_input(None),
    )
    return CleanupReport(dry_run=False, tables=[tables], other_modes=[])


def _lab() -> LabReport:
    node = HostState("node1", "node", ("10.0.0.11", "fd00:10::11"), agent=2961, proxy="agent")
    pod = HostState("web-1", "pod", ("10.244.1.2", "fd00:10:244:1::2"), "node1", "ready")
    ports = (LabPort(80, "TCP", 30086),)
    service = ServiceState("default", "web", ("10.96.1.1", "fd00:10:96::101"), ports)
    return LabReport(
        lab="lab", logs=_LOGS, api="http://10.0.0.1:6443", hosts=(node, pod), services=(service,)
    )


def _live() -> LiveTraceReport:
    client, endpoint = Location(LocationKind.POD, "10.244.1.9", "node1"), "10.244.2.2"
    end = TracedEnd(
        text=f"{endpoint}:8080 on node2; sees client {client.address}",
        result=EndResult.SENT,
        good=True,
        probability=1.0,
        address=endpoint,
        port=8080,
        kind=LocationKind.POD,
        node="node2",
        pod="default/web-2",
        node_assumed=False,
        endpoint=False,
        translated_on=None,
        stale=False,
        client=client.address,
        client_assumed=False,
        masqueraded_on=None,
        route=("node1", "node2"),
        rule=None,
    )
    visits = (TracedVisit("node1", "where the packet starts", (), "eth0", False, 1.0, None),)
    way = TracedWay("node1", ends=(end,), visits=visits)
    static = report(client, TracedDestination("TCP", endpoint, 8080), (way,), alone=True)
    probe = Probe(client.address, 20415, ProbeOutcome.CONNECTED, 91.2, 0.0004)
    side = FlowSide(client.address, 20415, endpoint, 8080)
    back = FlowSide(endpoint, 8080, client.address, 20415)
    flow = Flow(Family.IPV4, Protocol.TCP, side, back, "ESTABLISHED", assured=True, timeout=86400)
    rise = RuleRise("nat", "PREROUTING", "-j KUBE-SERVICES", 1, False)
    hit = RuleHit(20415, "filter", "FORWARD", "policy accept", "accept")
    view = NodeView("node1", (flow,), (0.0001,), rises=(rise,), met=1, hits=(hit,))
    listening = Listening(endpoint, 8080, "node2", probe)
    return compare(static, Observations((probe,), (view,), (listening,)))


def _demo() -> DemoReport:
    log = (LogEntry("client", "connection refused"),)
    result = ScenarioResult("refused", "A Service that refuses", ok=True, seconds=1.52, log=log)
    return DemoReport(lab="demo", backend="auto", ok=True, seconds=1.52, scenarios=(result,))
