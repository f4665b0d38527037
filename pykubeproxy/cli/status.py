"""`status`: check the health of proxies."""

import sys
import time

import click
from msgspec.structs import replace

from pykubeproxy.cli.cluster import (
    ClusterOptions,
    cluster_options,
    node_option,
    selected_nodes,
)
from pykubeproxy.cli.emit import emit, report_option
from pykubeproxy.cli.help import DIFFERENT, SOURCE, command, option
from pykubeproxy.cli.sources import bundle_option
from pykubeproxy.cli.terminal import click_errors, progress
from pykubeproxy.inspect.node import ReadError
from pykubeproxy.inspect.status import StatusReport, agent_status, status_report
from pykubeproxy.nodes.agent import DEFAULT_URL, NoAgent, fetch
from pykubeproxy.pages.status_text import moment
from pykubeproxy.pages.statusz import AgentStatus, decode


@command(
    exit_codes={0: "Healthy.", 1: "Not healthy.", 2: "Unknown: no agent answers, or wrong usage."},
    short_help="Check agent health.",
)
@option(
    "--url",
    metavar="URL",
    help=f"Metrics address of the agent, on loopback.  [default: {DEFAULT_URL}]",
    group=SOURCE,
)
@bundle_option
@report_option()
@click_errors(ReadError)
def status(url: str | None, bundle_file: str | None, output: str) -> None:
    """Show the health of the agent on this node, its rules, recent syncs and pending changes.

    For services and endpoints, use -o json or open /statusz of its metrics address in a browser on the node. The agent
    answers over loopback only. With --bundle, show the health when the bundle was made.

    \b
    pykubeproxy status
    pykubeproxy status --url http://127.0.0.1:10259 -o json
    """
    if url is not None and bundle_file:
        raise click.UsageError("--bundle cannot be combined with --url; remove one of them")
    if bundle_file:
        found = _of_bundle(bundle_file)
    else:
        body = _fetched(url or DEFAULT_URL, output)
        agent = _decoded(body, url or DEFAULT_URL, "set --url to its metrics address")
        notes = () if url else _firewall_notes(agent)
        found = status_report([replace(agent_status(agent), notes=notes)], time.time())
    _show(found, output)


@command(
    "status",
    short_help="Show which proxy runs on each node, and its health.",
    exit_codes={0: "Nothing is wrong.", 1: "Something is wrong on a node.", 2: "Wrong usage or a failure."},
)
@report_option()
@node_option
@cluster_options
def status_of_nodes(output: str, nodes: tuple[str, ...], cluster: ClusterOptions) -> None:
    """Show the proxy of each node: its version, mode and backend, restarts, and what is wrong with it.

    For pykubeproxy, this shows the health that its agent reports. For kube-proxy, it shows the state of its pod, and
    whether it has written rules; use diff to see whether they are up to date. On all nodes, name rules of nftables that
    stop packets to Services.

    \b
    kubectl pykubeproxy status
    kubectl pykubeproxy status --node node1 -o json
    """
    from pykubeproxy.nodes.proxy_states import cluster_status

    with (
        selected_nodes(cluster, nodes) as (access, wanted),
        progress(len(wanted), "Reading nodes") as advance,
    ):
        found = cluster_status(access, wanted, advance)
    _show(found, output)


def _firewall_notes(agent: AgentStatus) -> tuple[str, ...]:
    """Return which rules of nftables stop packets to Services on this node, as far as this process may read them."""
    from pykubeproxy.kernel import nftables

    try:
        if not sys.platform.startswith("linux") or not nftables.native_tables():
            return ()
    except OSError:
        return ()
    from pykubeproxy.nodes.live_firewalls import firewall_warnings  # few nodes have such tables

    return firewall_warnings(agent.backend)


def _show(found: StatusReport, output: str) -> None:
    emit(found, output)
    if not found.healthy:
        raise SystemExit(DIFFERENT)


def _fetched(url: str, output: str) -> bytes:
    """Return the status of the agent at a URL, with Services only for documents. Raises ReadError."""
    try:
        return fetch(url, "/statusz", **({} if output in ("json", "yaml") else {"limit": "0"}))
    except NoAgent as error:
        raise ReadError(f"{error}; start the agent or set --url to its metrics address") from None


def _of_bundle(path: str) -> StatusReport:
    from pykubeproxy.bundle.layout import STATUS
    from pykubeproxy.nodes.saved import open_bundle

    bundle = open_bundle(path)
    if STATUS not in bundle.files:
        raise ReadError(
            f"{bundle.name} has no status of an agent ({bundle.why_missing(STATUS)}); use `pykubeproxy dump-rules` or"
            " `pykubeproxy diff` with this bundle"
        )
    agent = _decoded(bundle.files[STATUS], f"the status in {path}", "use the pykubeproxy that made it")
    saved = f"From {bundle.name}, saved at {moment(agent.now)}."
    return status_report([replace(agent_status(agent), notes=(saved,))], agent.now)


def _decoded(body: bytes, place: str, advice: str) -> AgentStatus:
    try:
        return decode(body)
    except ValueError as error:
        raise ReadError(f"{place} is not an agent of this pykubeproxy version: {error}; {advice}") from None
