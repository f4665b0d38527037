"""Which pod gets a new connection and which client address it sees: balancing, affinity, policies, edge cases."""

import time

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT, CLIENT_CROWD
from pykubeproxy.lab.prober import Prober, Target
from pykubeproxy.lab.scenarios.scenario import Run, bounds, expect, expect_balanced, expect_errors, scenario

AFFINITY_SECONDS = 2
CONNECTIONS = 50
#: A refusal takes milliseconds; a retransmitted SYN takes a second.
REFUSAL_SECONDS = 0.25


@scenario(
    "Scale a Deployment 1 → 3 → 1",
    why="Each of n endpoints gets a new connection with probability 1/n.",
)
def scale(run: Run) -> None:
    """Connect to the cluster IP while pods are added and removed."""
    lab = run.lab
    (caller,) = lab.deploy("caller", 1)
    pods = lab.deploy("web", 1)
    vip = lab.service("web").vip()
    run.check_balanced("1 pod", caller.prober, vip, pods, 200)

    pods += lab.deploy("web", 2)
    run.check_balanced("3 pods", caller.prober, vip, pods, 600)
    low, high = run.check_balanced("from node2", lab.nodes["node2"].prober, vip, pods, 600)
    run.log("", f"random shares: {low} to {high} for each pod, with one exception in a million")

    for pod in pods[1:]:
        lab.stop_pod(pod)
    seconds = run.settle(caller.prober, vip, pods[:1])
    run.check_balanced("1 pod again", caller.prober, vip, pods[:1], 200)
    run.log("", f"rules followed after {seconds:.2f} s")


@scenario(
    "Session affinity ClientIP",
    why="A pod's chain records its clients (-m recent); the Service's chain checks them first.",
    command="sh -c 'head /proc/net/xt_recent/KUBE-SEP-*'",
)
def affinity(run: Run) -> None:
    """Connect to a node port from 20 clients, with an affinity timeout of 2 seconds."""
    lab = run.lab
    pods = lab.deploy("web", 3)
    service = lab.service(
        "web",
        type="NodePort",
        sessionAffinity="ClientIP",
        sessionAffinityConfig={"clientIP": {"timeoutSeconds": AFFINITY_SECONDS}},
    )
    target = lab.nodes["node1"].node_port(service)
    prober = lab.client.prober
    lab.until(lambda: not prober.tcp(target).failed, "the node port answers")
    _expire(lab)

    first = {address: _only_pod(lab, target, address, 5) for address in CLIENT_CROWD}
    used = sorted(set(first.values()))
    expect(len(used) > 1, "20 clients spread over the pods", ", ".join(used))
    run.log("sticky", f"20 clients, 5 connections each: each client stays on one pod, {len(used)} pods used")

    end = time.monotonic() + 1.5 * AFFINITY_SECONDS
    while time.monotonic() < end:
        for address in CLIENT_CROWD[:4]:
            pod = _only_pod(lab, target, address, 1)
            expect(pod == first[address], f"{address} to stay on {first[address]}", pod)
        time.sleep(AFFINITY_SECONDS / 8)
    run.log("renewed", f"4 clients with regular connections stay for {1.5 * AFFINITY_SECONDS:.0f} s")

    _expire(lab)
    again = {address: _only_pod(lab, target, address, 2) for address in CLIENT_CROWD}
    moved = sum(again[address] != first[address] for address in CLIENT_CROWD)
    low, high = bounds(len(CLIENT_CROWD), 1 - 1 / len(pods))
    expect(low <= moved <= high, f"{low} to {high} of 20 clients on another pod", moved)
    run.log("expired", f"after {AFFINITY_SECONDS} idle seconds {moved} of 20 clients are on another pod")
    run.log("", f"random choice moves 2 of 3: {low} to {high} clients")


def _expire(lab: Lab) -> None:
    time.sleep(AFFINITY_SECONDS + 0.5)
    lab.check()


def _only_pod(lab: Lab, target: Target, client: str, connections: int) -> str:
    result = lab.client.prober.tcp(target, connections, source=client)
    expect(not result.failed and len(result.pods) == 1, f"{client} to reach one pod", result)
    return next(iter(result.pods))


@scenario(
    "UDP, IPv6, hairpin, and a Service without endpoints",
    why="A pod behind its own VIP is masqueraded; a Service without endpoints gets a REJECT.",
    command="pykubeproxy dump-rules default/empty",
)
def edge_cases(run: Run) -> None:
    """Use both protocols and address families, let a pod call itself, and call a Service without pods."""
    lab = run.lab
    (caller,) = lab.deploy("caller", 1)
    pods = lab.deploy("web", 3)
    web = lab.service("web", protocols=("TCP", "UDP"))
    (single,) = lab.deploy("self", 1)
    own = lab.service("self")
    empty = lab.service("empty", protocols=("TCP", "UDP"), type="NodePort")

    for family in (4, 6):
        run.settle(caller.prober, web.vip(family), pods)
        result = caller.prober.udp(web.vip(family), 300)
        expect_balanced(result, pods)
        run.log(f"UDP, IPv{family}", f"300 datagrams: {result}")
    run.check_balanced("TCP, IPv6", caller.prober, web.vip(6), pods, 300)

    node = lab.nodes[single.site.name]
    for family in (4, 6):
        run.settle(single.prober, own.vip(family), [single])
        result = single.prober.tcp(own.vip(family), 30)
        address = node.addresses[family == 6]
        expect(set(result.clients) == {address}, f"client address {address}", dict(result.clients))
        run.log(f"hairpin, IPv{family}", f"30 connections: {result}; client address {address} (its node)")

    node2, slowest = lab.nodes["node2"], 0.0
    for family in (4, 6):
        for prober, target in (
            (caller.prober, empty.vip(family)),
            (node2.prober, empty.vip(family)),
            (lab.client.prober, node2.node_port(empty, family)),
        ):
            slowest = max(slowest, _refusal(lab, prober, target))
    run.log("no endpoints", "refused from a pod, a node and outside, over both families")
    run.log("", f"the slowest refusal took {slowest * 1000:.2f} ms")


def _refusal(lab: Lab, prober: Prober, target: Target) -> float:
    """Expect connections and datagrams to be refused; return the slowest refusal in seconds."""
    lab.until(lambda: prober.tcp(target).errors["refused"] == 1, f"{target} refuses connections")
    result = prober.tcp(target, 5) + prober.udp(target, 5)
    expect_errors(result, "refused")
    expect(result.slowest < REFUSAL_SECONDS, f"a refusal at once by {target}", f"{result.slowest:.3f} s")
    return result.slowest


@scenario(
    "Client address by externalTrafficPolicy Cluster and Local",
    why="Cluster masquerades, since the pod may be on another node; Local never leaves the node.",
    command="pykubeproxy dump-rules default/web-local",
)
def client_address(run: Run) -> None:
    """Connect from outside to a node port on both nodes, while all pods are on node1."""
    lab = run.lab
    lab.deploy("web", 2, nodes=["node1"])
    cluster = lab.service("web", type="NodePort")
    local = lab.service("web-local", type="NodePort", externalTrafficPolicy="Local", selector={"app": "web"})
    for family in (4, 6):
        for name, node in lab.nodes.items():
            clients = _clients(lab, node.node_port(cluster, family), node.addresses[family == 6])
            run.log(f"Cluster, IPv{family}", f"through {name} the pods see {clients}")
    run.inspect(
        "node1", f"trace {CLIENT[0]} {lab.nodes['node1'].node_port(cluster)}", "its source is replaced"
    )
    for family in (4, 6):
        node1, node2 = lab.nodes["node1"], lab.nodes["node2"]
        clients = _clients(lab, node1.node_port(local, family), CLIENT[family == 6])
        run.log(f"Local, IPv{family}", f"through node1 the pods see {clients}")
        result = lab.client.prober.tcp(node2.node_port(local, family), 3, timeout=0.3)
        expect_errors(result, "timeout")
        run.log("", f"through node2, which has no pod: {result}")
    run.inspect("node1", f"trace {CLIENT[0]} {lab.nodes['node1'].node_port(local)}", "keeps its source")


def _clients(lab: Lab, target: Target, expected: str) -> str:
    """Expect one client address at the pods, and return it."""
    lab.until(lambda: not lab.client.prober.tcp(target).failed, f"{target} answers")
    result = lab.client.prober.tcp(target, CONNECTIONS)
    clients = ", ".join(sorted(result.clients))
    expect(not result.failed and clients == expected, f"client address {expected}", f"{clients}, {result}")
    return clients
