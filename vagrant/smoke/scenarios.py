"""The situations, each with real pods. They raise Failed or give why not; "" means all is well."""

from collections.abc import Callable
from typing import NamedTuple

from vagrant.smoke import answers
from vagrant.smoke.cluster import Cluster, Failed

# What keeps our agent off a node.
_ELSEWHERE = "kube-proxy"
_LOAD = 100  # requests at least during a rolling update


class Skipped(Exception):
    """This cluster does not allow for it; `str()` says why."""


def agents(cluster: Cluster) -> str:
    """Every node that is to have an agent has one, and all are ready."""
    wanted, ready = cluster.wanted_and_ready()
    if not wanted:
        return "no node is to have one"
    return f"{ready} of {wanted} are ready" if ready < wanted else ""


def scale(cluster: Cluster) -> str:
    """A deployment goes from one pod to three and back, and connections follow."""
    for replicas in (1, 3, 1):
        if why := _follows(cluster, cluster.scale(replicas)):
            return f"with {replicas} pods: {why}"
    return ""


def proxy_stopped(cluster: Cluster) -> str:
    """While no agent is on a node its rules stay as they are; when one is back, they follow what has changed."""
    if cluster.has_kube_proxy():
        raise Skipped("kube-proxy would take the agent's place")
    node = cluster.client_node()
    before, label = cluster.scale(1), cluster.label(node)
    if why := _follows(cluster, before):
        return why
    try:
        cluster.relabel(node, _ELSEWHERE)
        cluster.until(lambda: node not in cluster.agents(), f"the agent to leave {node}")
        after = cluster.scale(3)
        if why := answers.only(cluster.probe(), before):
            return f"without an agent: {why}"
    finally:
        cluster.relabel(node, label)
    cluster.until(lambda: cluster.agents().get(node), f"an agent on {node}")
    return _follows(cluster, after)


def client_address(cluster: Cluster) -> str:
    """Behind ingress-nginx the client's address is seen under the policy Local, and not under Cluster."""
    if not cluster.has_ingress():
        raise Skipped("there is no ingress-nginx")
    cluster.scale(1)
    port, policy = cluster.expose(), cluster.policy()
    nodes = cluster.node_addresses()
    ours = {node: cluster.own_address(address) for node, address in nodes.items()}

    def replies() -> dict[str, answers.Reply | None]:
        return {node: cluster.ask(address, port) for node, address in nodes.items()}

    try:
        cluster.set_policy("Cluster")
        if why := _soon(cluster, lambda: answers.hidden(replies(), ours)):
            return f"Cluster: {why}"
        cluster.set_policy("Local")
        if why := _soon(cluster, lambda: answers.kept(replies(), ours, cluster.ingress_nodes())):
            return f"Local: {why}"
    finally:
        cluster.set_policy(policy)
    return ""


def rolling_update(cluster: Cluster) -> str:
    """All pods are replaced under load, and no request fails."""
    before = cluster.scale(3)
    load = cluster.load()
    try:
        cluster.restart()
    finally:
        seen = load.stop()
    if why := answers.unbroken(seen, _LOAD):
        return why
    return "" if seen.pods.keys() - before else "no request went to a new pod"


class Scenario(NamedTuple):
    """One of them, by name."""

    name: str
    try_: Callable[[Cluster], str]

    @property
    def about(self) -> str:
        """What it shows."""
        return (self.try_.__doc__ or "").strip()


SCENARIOS = (
    Scenario("agents", agents),
    Scenario("scale", scale),
    Scenario("proxy-stopped", proxy_stopped),
    Scenario("client-address", client_address),
    Scenario("rolling-update", rolling_update),
)


def _follows(cluster: Cluster, pods: set[str]) -> str:
    """Whether connections come to go to these pods, and then all of them do."""
    return _soon(cluster, lambda: answers.only(cluster.probe(), pods))


def _soon(cluster: Cluster, judge: Callable[[], str]) -> str:
    """The last judgement, once it is good or time is up: what was just changed takes a moment to arrive."""
    why = judge()

    def good() -> bool:
        nonlocal why
        why = why and judge()
        return not why

    try:
        cluster.until(good, "connections to be as they should")
    except Failed:
        return why
    return ""
