"""The scenarios, with real pods. Each returns the reason of its failure or "", or raises Failed."""

from collections.abc import Callable
from typing import NamedTuple

from vagrant.smoke import answers
from vagrant.smoke.cluster import Cluster, Failed

# This label value keeps pykubeproxy off a node.
_KUBE_PROXY = "kube-proxy"
# A quick rolling update sees few requests: repeat it until there are enough to judge.
_REQUESTS, _ROLLOUTS = 100, 5


class Skipped(Exception):
    """The cluster does not support the scenario; `str()` gives the reason."""


def agents(cluster: Cluster) -> str:
    """Every selected node has an agent, and all agents are ready."""
    return _soon(cluster, lambda: answers.ready(*cluster.desired_and_ready()), "all agents to be ready")


def scale(cluster: Cluster) -> str:
    """A deployment scales from one pod to three and back, and connections follow."""
    for replicas in (1, 3, 1):
        if why := _follows(cluster, cluster.scale(replicas)):
            return f"with {replicas} pods: {why}"
    return ""


def proxy_stopped(cluster: Cluster) -> str:
    """Without an agent, a node keeps its rules; a new agent updates them."""
    if cluster.has_kube_proxy():
        raise Skipped("the cluster also has kube-proxy, which would run instead")
    node = cluster.client_node()
    before, label = cluster.scale(1), cluster.label(node)
    if why := _follows(cluster, before):
        return why
    try:
        cluster.relabel(node, _KUBE_PROXY)
        cluster.until(lambda: node not in cluster.agents(), f"the agent to leave {node}")
        after = cluster.scale(3)
        if why := answers.only(cluster.probe(), before):
            return f"without an agent: {why}"
    finally:
        cluster.relabel(node, label)
    cluster.until(lambda: cluster.agents().get(node), f"an agent on {node}")
    return _follows(cluster, after)


def client_address(cluster: Cluster) -> str:
    """ingress-nginx sees the client's address with externalTrafficPolicy Local, but not with Cluster."""
    if not cluster.has_ingress():
        raise Skipped("ingress-nginx is not installed")
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
    """Rolling updates under load fail no request."""
    before = cluster.scale(3)
    seen = answers.NOTHING
    for _ in range(_ROLLOUTS):
        seen = answers.combined(seen, _restarted_under_load(cluster))
        if seen.failed or seen.requests >= _REQUESTS:
            break
    if why := answers.unbroken(seen, _REQUESTS):
        return why
    return "" if seen.pods.keys() - before else "no request reached a new pod"


class Scenario(NamedTuple):
    """A scenario and its name."""

    name: str
    try_: Callable[[Cluster], str]

    @property
    def about(self) -> str:
        """Return what the scenario shows."""
        return (self.try_.__doc__ or "").strip()


SCENARIOS = (
    Scenario("agents", agents),
    Scenario("scale", scale),
    Scenario("proxy-stopped", proxy_stopped),
    Scenario("client-address", client_address),
    Scenario("rolling-update", rolling_update),
)


def _restarted_under_load(cluster: Cluster) -> answers.Seen:
    """Return the result of the requests during one rolling update."""
    load = cluster.load()
    try:
        cluster.restart()
    finally:
        seen = load.stop()
    return seen


def _follows(cluster: Cluster, pods: set[str]) -> str:
    """Wait until all connections go to exactly these pods; return the reason if they do not."""
    return _soon(cluster, lambda: answers.only(cluster.probe(), pods))


def _soon(cluster: Cluster, check: Callable[[], str], what: str = "connections to follow the change") -> str:
    """Repeat a check until it passes or times out, because changes take a moment to arrive; return its last result."""
    why = check()

    def good() -> bool:
        nonlocal why
        why = why and check()
        return not why

    try:
        cluster.until(good, what)
    except Failed:
        return why
    return ""
