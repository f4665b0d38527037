"""`kubectl pykubeproxy check`: check the proxies of nodes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.cli.flags import output_option
from pykubeproxy.cli.help import DIFFERENT, NOT_ANSWERED, command
from pykubeproxy.cli.kubectl.access import list_nodes, node_access, on_each_node, open_client
from pykubeproxy.cli.kubectl.arguments import NodeSelection, PodOptions, ServerOptions
from pykubeproxy.cli.kubectl.options import node_options, pod_options, server_options
from pykubeproxy.cli.terminal import click_errors, echo_json, echo_styled
from pykubeproxy.inspect.preflight import kube_proxy, report
from pykubeproxy.inspect.preflight.report import Finding
from pykubeproxy.remote import ReadNode, UnreadNode, find_node_pods
from pykubeproxy.remote.states import ProxyState, proxy_state
from pykubeproxy.sources import Client, SourceError
from pykubeproxy.sources.failures import Failure
from pykubeproxy.sources.server_version import server_version
from pykubeproxy.wording import one_line, styled, text_of


class _Checked(msgspec.Struct, frozen=True):
    state: ProxyState
    findings: tuple[Finding, ...]


class _Report(msgspec.Struct):
    """What `pykubeproxy check -o json` prints."""

    checks: tuple[Finding, ...]


@command(
    short_help="Check the proxies of nodes, and print what to do about problems.",
    exit_codes={
        0: "No check failed.",
        1: "A check failed on a node.",
        2: "Wrong usage or a failure, or a node could not be read.",
    },
)
@output_option
@node_options
@server_options
@pod_options
@click_errors(SourceError)
def check(output: str, server: ServerOptions, nodes: NodeSelection, pods: PodOptions) -> None:
    """Check the proxies of nodes, and print what to do about each problem.

    On nodes with pykubeproxy, run `pykubeproxy check` in its pod. On others, check what can be seen from outside: the pod
    of kube-proxy, its version, the backend of its rules, and the jumps to its chains.

    \b
    kubectl pykubeproxy check --all-nodes
    kubectl pykubeproxy check --node node1 -o json
    """
    client = open_client(server)
    wanted = list_nodes(client, nodes)
    with node_access(client, pods) as access:
        proxies = find_node_pods(access, wanted)
        states = on_each_node(
            lambda node: proxy_state(access, node, proxies, "check"), wanted, pods, "Checking nodes"
        )
    version = _server_version(client)
    checked = sorted((_checked(it, version) for it in states), key=lambda it: it.state.node.name)
    if output == "json":
        echo_json(document(checked))
    else:
        echo_styled(text_of(*map(_lines, checked)))
    if not all(report.passed(it.findings) for it in checked):
        raise SystemExit(DIFFERENT)
    if any(_is_unread(it.state) for it in checked):
        raise SystemExit(NOT_ANSWERED)


def _is_unread(state: ProxyState) -> bool:
    unread = isinstance(state.read, UnreadNode) and not state.read.other_proxy
    return unread or bool(state.failure)


def _server_version(client: Client) -> str:
    """Return the version of the API server, "" if it does not tell."""
    try:
        return server_version(client)
    except Failure:
        return ""


def _checked(state: ProxyState, server: str) -> _Checked:
    if state.answer:
        try:
            found = msgspec.json.decode(state.answer, type=_Report).checks
        except (ValueError, RecursionError) as error:
            failure = f"its agent is of another version: {one_line(str(error))}"
            state = msgspec.structs.replace(state, answer=b"", failure=failure)
        else:
            return _Checked(state, found)
    return _Checked(state, tuple(_findings(state, server)))


def _findings(state: ProxyState, server: str) -> Iterator[Finding]:
    proxy, read = state.proxy, state.read
    if proxy:
        yield kube_proxy.pod(
            str(proxy),
            str(proxy.pod),
            phase="being deleted" if proxy.pod.deleting else proxy.pod.phase,
            ready=proxy.container.ready,
            restarts=proxy.container.restarts,
            problem=proxy.container.problem or proxy.pod.reason,
        )
        if not proxy.ours:
            yield kube_proxy.version(proxy.version, server)
    match read:
        case ReadNode():
            rulesets = [it.ruleset for it in read.tables.values()]
            yield from kube_proxy.tables(rulesets, state.backend, read.other_backend)
            for family, reason in read.unread.items():
                yield kube_proxy.unread(reason, family)
        case UnreadNode(other_proxy=True):
            yield kube_proxy.other_mode(read.reason)
        case UnreadNode():
            yield kube_proxy.unread(read.reason) if proxy else kube_proxy.no_pod(read.reason)
    if state.failure:
        yield kube_proxy.unread(state.failure)


def _lines(checked: _Checked) -> Iterator[str]:
    name, proxy = checked.state.node.name, checked.state.proxy
    yield styled(f"{name}  {proxy or 'no pod of a proxy'}", bold=True)
    yield from report.finding_lines(checked.findings)


def document(checked: Sequence[_Checked]) -> dict[str, object]:
    """The checks of nodes as a JSON document of version pykubeproxy/v1.

    {"apiVersion": "pykubeproxy/v1",
     "passed": true if no check failed on any node,
     "nodes": [{"node": its name, "proxy": such as "kube-proxy v1.35.1", "" without a pod, "pod": NAMESPACE/NAME, or "",
                "passed": true if no check failed, "complete": true if no check was skipped,
                "checks": as `pykubeproxy check` prints them; for kube-proxy, "check" is
                          "pod"|"version"|"mode"|"tables"|"jumps"|"leftovers"|"other-tables"}]}

    Nodes are ordered by name. Checks and keys may be added.
    """
    entries: list[Mapping[str, Any]] = [_entry(it) for it in checked]
    return {
        "apiVersion": API_VERSION,
        "passed": all(it["passed"] for it in entries),
        "nodes": entries,
    }


def _entry(checked: _Checked) -> dict[str, object]:
    proxy = checked.state.proxy
    return {
        "node": checked.state.node.name,
        "proxy": str(proxy) if proxy else "",
        "pod": str(proxy.pod) if proxy else "",
        "passed": report.passed(checked.findings),
        "complete": report.complete(checked.findings),
        "checks": msgspec.to_builtins(checked.findings),
    }
