"""How Services treat connections: balancing, affinity, policies, changes, and reverse proxies in front of them."""

import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pykubeproxy.lab.agents import ProxyProcess
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import OUTSIDE, OUTSIDE_CROWD, OUTSIDE_GATEWAY
from pykubeproxy.lab.pods import LabPod, workload
from pykubeproxy.lab.prober import Prober, ProbeResult, ProbeTarget
from pykubeproxy.lab.scenarios.scenario import (
    Run,
    bounds,
    expect,
    expect_balanced,
    expect_errors,
    expect_pods,
    names,
    scenario,
)

AFFINITY_SECONDS = 2
CONNECTIONS = 50
GRACE = 1.0
MIN_SYNC = 5.0
CHANGES = 20
LINGER = 0.5
BALANCER_DELAY = 1.5
BALANCER = ProbeTarget(OUTSIDE_GATEWAY[0], 8080)
GATE = "load-balancer"


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
    run.log("", f"random shares: {low} to {high} for each pod; outside once in a million runs")

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
    prober = lab.outside.prober
    lab.until(lambda: not prober.tcp(target).failed, "the node port answers")
    _expire(lab)

    first = {address: _only_pod(lab, target, address, 5) for address in OUTSIDE_CROWD}
    used = sorted(set(first.values()))
    expect(len(used) > 1, "20 clients spread over the pods", ", ".join(used))
    run.log("sticky", f"20 clients, 5 connections each: each client stays on one pod, {len(used)} pods used")

    end = time.monotonic() + 1.5 * AFFINITY_SECONDS
    while time.monotonic() < end:
        for address in OUTSIDE_CROWD[:4]:
            pod = _only_pod(lab, target, address, 1)
            expect(pod == first[address], f"{address} to stay on {first[address]}", pod)
        time.sleep(AFFINITY_SECONDS / 8)
    run.log("renewed", f"4 clients with regular connections stay for {1.5 * AFFINITY_SECONDS:.0f} s")

    _expire(lab)
    again = {address: _only_pod(lab, target, address, 2) for address in OUTSIDE_CROWD}
    moved = sum(again[address] != first[address] for address in OUTSIDE_CROWD)
    low, high = bounds(len(OUTSIDE_CROWD), 1 - 1 / len(pods))
    expect(low <= moved <= high, f"{low} to {high} of 20 clients on another pod", moved)
    run.log("expired", f"after {AFFINITY_SECONDS} idle seconds {moved} of 20 clients are on another pod")
    run.log("", f"random choice moves 2 of 3: {low} to {high} clients")


def _expire(lab: Lab) -> None:
    time.sleep(AFFINITY_SECONDS + 0.5)
    lab.check()


def _only_pod(lab: Lab, target: ProbeTarget, client: str, connections: int) -> str:
    result = lab.outside.prober.tcp(target, connections, source=client)
    expect(not result.failed and len(result.pods) == 1, f"{client} to reach one pod", result)
    return next(iter(result.pods))


@scenario(
    "UDP, IPv6, hairpin, and a Service without endpoints",
    why="A pod behind its own cluster IP is masqueraded; a Service without endpoints gets a REJECT.",
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
            (lab.outside.prober, node2.node_port(empty, family)),
        ):
            slowest = max(slowest, _refusal(lab, prober, target))
    run.log("no endpoints", "refused from a pod, a node and outside, over both families")
    run.log("", f"the slowest refusal took {slowest * 1000:.2f} ms")


def _refusal(lab: Lab, prober: Prober, target: ProbeTarget) -> float:
    """Expect connections and datagrams to be refused; return the slowest refusal in seconds."""
    lab.until(lambda: prober.tcp(target).errors["refused"] == 1, f"{target} refuses connections")
    result = prober.tcp(target, 5) + prober.udp(target, 5)
    expect_errors(result, "refused")
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
        "node1",
        f"trace {OUTSIDE[0]} {lab.nodes['node1'].node_port(cluster)}",
        "masqueraded by",
    )
    for family in (4, 6):
        node1, node2 = lab.nodes["node1"], lab.nodes["node2"]
        clients = _clients(lab, node1.node_port(local, family), OUTSIDE[family == 6])
        run.log(f"Local, IPv{family}", f"through node1 the pods see {clients}")
        result = lab.outside.prober.tcp(node2.node_port(local, family), 3, timeout=0.3)
        expect_errors(result, "timed out")
        run.log("", f"through node2, which has no pod: {result}")
    run.inspect(
        "node1", f"trace {OUTSIDE[0]} {lab.nodes['node1'].node_port(local)}", f"sees client {OUTSIDE[0]}"
    )


def _clients(lab: Lab, target: ProbeTarget, expected: str) -> str:
    """Expect one client address at the pods, and return it."""
    lab.until(lambda: not lab.outside.prober.tcp(target).failed, f"{target} answers")
    result = lab.outside.prober.tcp(target, CONNECTIONS)
    clients = ", ".join(sorted(result.clients))
    expect(not result.failed and clients == expected, f"client address {expected}", f"{clients}, {result}")
    return clients


@scenario(
    "Unready and terminating endpoints",
    why="The proxy uses ready endpoints; without any, those that are serving and terminating.",
)
def conditions(run: Run) -> None:
    """Make pods unready, publish them with publishNotReadyAddresses, and make them terminate."""
    lab = run.lab
    (caller,) = lab.deploy("caller", 1)
    pods = lab.deploy("web", 3)
    vip = lab.service("web").vip()
    prober = caller.prober

    pods[1].set_answering(False)
    run.check_balanced(f"{pods[1].name} unready", prober, vip, [pods[0], pods[2]], 300)
    lab.change_service("web", publishNotReadyAddresses=True)
    run.check_balanced("published", prober, vip, pods, 300)

    lab.change_service("web", publishNotReadyAddresses=False)
    for pod in pods:
        pod.set_answering(False)
    lab.until(lambda: prober.tcp(vip).errors["refused"] == 1, f"{vip} refuses connections")
    result = prober.tcp(vip, 20)
    expect_errors(result, "refused")
    run.log("all unready", f"20 connections: {result}")

    for pod in pods:
        pod.set_answering(True)
    for pod in pods[:2]:
        pod.mark_terminating()
    run.check_balanced("2 terminating", prober, vip, pods[2:], 200)
    pods[2].mark_terminating()
    run.check_balanced("3 terminating", prober, vip, pods, 300)


@scenario(
    "A rolling update with continuous connections",
    why=f"The rules drop a terminating pod long before its grace period ({GRACE:.0f} s) ends.",
)
def rolling_update(run: Run) -> None:
    """For each pod, start a new one, wait until it is ready, then stop the old one."""
    lab = run.lab
    (caller,) = lab.deploy("caller", 1, nodes=["node1"])
    old = lab.deploy("web", 3, linger=GRACE)
    service = lab.service("web", type="NodePort")
    vip = service.vip()
    sources = {
        "from a pod": (caller.prober, vip),
        "from node2": (lab.nodes["node2"].prober, vip),
        "from outside": (lab.outside.prober, lab.nodes["node1"].node_port(service)),
    }
    for prober, target in sources.values():
        run.settle(prober, target, old)
    streams = {source: prober.stream(target) for source, (prober, target) in sources.items()}
    new: list[LabPod] = []
    for pod in old:
        new += lab.deploy("web", 1, linger=GRACE)
        lab.stop_pod(pod)
    run.settle(caller.prober, vip, new)
    results = {source: stream.stop() for source, stream in streams.items()}
    for source, result in results.items():
        run.log(
            source, f"{result.total} connections, {result.failed} failed, {len(result.pods)} pods answered"
        )
        expect(not result.failed, "no failed connection", result)
        expect_pods(result, [*old, *new])
    run.check_balanced("afterwards", caller.prober, vip, new, 100)


@scenario(
    "Stop the agent of a node",
    why="The rules stay when the agent stops, and the removed pod stays in them.",
)
def agent_stopped(run: Run) -> None:
    """Replace one of three pods while the agent on node1 is stopped, then start it again."""
    lab = run.lab
    (caller,) = lab.deploy("caller", 1, nodes=["node1"])
    pods = lab.deploy("web", 3)
    vip = lab.service("web").vip()
    node2 = lab.nodes["node2"].prober
    run.settle(caller.prober, vip, pods)
    run.settle(node2, vip, pods)

    agent = lab.agents["node1"]
    code = agent.stop()
    expect(code == 0, "exit code 0 from the agent", code)
    try:
        (new,) = lab.deploy("web", 1)
        lab.stop_pod(pods[0])
        current = [*pods[1:], new]
        result = caller.prober.tcp(vip, 300)
        run.log("agent stopped", f"{pods[0].name} replaced by {new.name}; 300 connections on node1:")
        run.log("", result)
        low, high = bounds(300, 1 / 3)
        expect(low <= result.failed <= high, f"{low} to {high} failed connections", result)
        expect(set(result.pods) == names(pods[1:]), "the other two pods and not the new one", result)
        run.check_balanced("agent on node2", node2, vip, current, 300)
        lab.nodes[pods[0].site.name].namespace.set_down(pods[0].interface)
        result = caller.prober.tcp(vip, 40, timeout=0.05)
        expect(result.errors["timed out"] > 0, "time-outs without the network of the removed pod", result)
        run.log("network gone", f"40 connections on node1: {result}")
        run.inspect_cluster("diff --sync-period 1", "node1: 1 wrong Service default/web", 1)
    finally:
        agent.start()
    seconds = run.settle(caller.prober, vip, current)
    result = caller.prober.tcp(vip, 300)
    expect_pods(result, current)
    run.log("started again", f"{result} ({seconds:.2f} s after its start)")


@scenario(
    f"Many changes within minSyncPeriod ({MIN_SYNC:.0f} s)",
    why="The agent writes the first change at once and collects the others until the period ends.",
    command="grep synced in the agent's log, node1.log in the lab's logs",
)
def min_sync_period(run: Run) -> None:
    """Toggle the readiness of a pod 20 times and count the calls of iptables-restore."""
    lab = run.lab
    (caller,) = lab.deploy("caller", 1, nodes=["node1"])
    pods = lab.deploy("web", 3)
    vip = lab.service("web", ipFamilyPolicy="SingleStack", ipFamilies=["IPv4"]).vip()
    run.settle(caller.prober, vip, pods)
    agent = lab.agents["node1"]
    agent.stop()
    pods[2].set_answering(False)  # a difference to write at the start, which shows when that was
    restarted = time.time()
    agent.start({"iptables": {"minSyncPeriod": f"{MIN_SYNC:.0f}s"}})
    try:
        run.settle(caller.prober, vip, pods[:2])
        idle = MIN_SYNC + 0.5
        lab.until(lambda: time.time() > max(agent.restores(restarted)) + idle, "the first period ends")
        started = time.time()
        for change in range(CHANGES - 1):
            pods[2].set_answering(change % 2 == 0)
            time.sleep(0.05)
        pods[0].set_answering(False)  # the last change
        changed = time.time()
        followed = run.settle(caller.prober, vip, pods[1:])
        lab.until(lambda: time.time() > started + MIN_SYNC + 1.5, "the period ends")
        restores = [moment - started for moment in agent.restores(started)]
    finally:
        agent.stop()
        agent.start()
    run.log("changes", f"{CHANGES} within {changed - started:.1f} s")
    run.log("restores", f"{len(restores)}, after " + " and ".join(f"{seconds:.2f} s" for seconds in restores))
    run.log("rules followed", f"{followed:.2f} s after the last change")
    expect(len(restores) == 2, "two restores", len(restores))
    first, second = restores
    late = changed + followed - started - second
    expect(first < MIN_SYNC / 2, "the first restore at once", f"{first:.2f} s")
    expect(second - first > MIN_SYNC - 0.5, "the second after the period", f"{second - first:.2f} s later")
    expect(late < MIN_SYNC / 2, "rules to follow the second restore at once", f"{late:.2f} s later")


@scenario(
    "An ingress controller notices a changed pod address",
    why="The controller watches EndpointSlices, as the agent does. Policy Local keeps client addresses.",
    command="pykubeproxy dump-rules default/ingress",
)
def ingress(run: Run) -> None:
    """Connect through an ingress controller behind a node port with policy Local, and replace a pod."""
    lab = run.lab
    pods = lab.deploy("web", 3)
    lab.service("web")
    command = workload("default/web", "--api", lab.api.url.removeprefix("http://"))
    controller = lab.start_pod("ingress-1", "ingress", "node1", command)
    controller.wait_answering()
    service = lab.service("ingress", type="NodePort", externalTrafficPolicy="Local")
    target = lab.nodes["node1"].node_port(service)
    lab.until(lambda: not lab.outside.prober.tcp(target, 3).failed, f"{target} answers")
    _expect_round_robin(run, "3 pods", target, pods)

    offsets = {name: len(agent.log()) for name, agent in lab.agents.items()}
    (new,) = lab.deploy("web", 1)
    old = pods.pop(0)
    lab.stop_pod(old)
    pods.append(new)
    lab.until(lambda: rotation(controller.log) == addresses(pods), "the controller uses the new address")
    _expect_round_robin(run, "one replaced", target, pods)
    for address, event in ((str(old.target()), "endpoint removed"), (str(new.target()), "used: ready")):
        _log_line(run, "controller", controller.log.read_text(), address)
        for name, agent in lab.agents.items():
            _wait_for_event(lab, agent, offsets[name], address, event)
        _log_line(run, "agent on node1", lab.agents["node1"].log()[offsets["node1"] :], address)


def _wait_for_event(lab: Lab, agent: ProxyProcess, offset: int, address: str, event: str) -> None:
    pattern = re.compile(
        rf"{re.escape(event)}.*{re.escape(address)}|{re.escape(address)}.*{re.escape(event)}"
    )
    lab.until(
        lambda: bool(pattern.search(agent.log()[offset:])), f'{agent.log_file} has "{event}" for {address}'
    )


def _log_line(run: Run, source: str, text: str, address: str) -> None:
    """Log the last line of a program's log about an added or removed address."""
    lines = [line for line in text.splitlines() if address in line and "rotation" not in line]
    expect(bool(lines), f"{address} in the log of the {source}", text[-500:])
    run.log(source, lines[-1].partition("] ")[2] or lines[-1].partition(" ")[2])


def _expect_round_robin(run: Run, label: str, target: ProbeTarget, pods: list[LabPod]) -> None:
    result = run.lab.outside.prober.tcp(target, 100)
    run.log(label, f"100 connections: {result}")
    expect_pods(result, pods)
    expect(sorted(result.pods.values()) == [33, 33, 34], "34, 33 and 33 connections", result)
    expect(set(result.real_ips) == {OUTSIDE[0]}, f"X-Real-IP {OUTSIDE[0]}", dict(result.real_ips))
    run.log("", f"X-Real-IP of all: {OUTSIDE[0]}, the client's own")


def addresses(pods: Iterable[LabPod]) -> set[str]:
    """Return the pods' addresses and ports."""
    return {str(pod.target()) for pod in pods}


def rotation(log: Path) -> set[str]:
    """Return the addresses that a reverse proxy uses now, from its log."""
    lines = [line for line in log.read_text().splitlines() if "in rotation: " in line]
    return set(lines[-1].partition("in rotation: ")[2].split(", ")) if lines else set()


@scenario(
    "A load balancer and a rollout disagree: readiness gates",
    why="A pod is ready when its probe succeeds and every gate is open. Others get no traffic.",
)
def readiness_gate(run: Run) -> None:
    """Roll out pods behind a load balancer that applies changes 1.5 seconds late, without and with a gate."""
    lab = run.lab
    (caller,) = lab.deploy("caller", 1)
    pods = lab.deploy("web", 2, linger=LINGER)
    vip = lab.service("web").vip()
    run.settle(caller.prober, vip, pods)

    (gated,) = lab.deploy("web", 1, gates=[GATE], linger=LINGER)
    direct, through = caller.prober.tcp(gated.target(), 50), caller.prober.tcp(vip, 200)
    run.log("gate closed", f"{gated.name} answers {direct.pods[gated.name]} of 50 direct connections")
    run.log("", f"200 connections to the cluster IP: {through}")
    expect(direct.pods[gated.name] == 50, "the gated pod to answer direct connections", direct)
    expect_pods(through, pods)
    gated.open_gate(GATE)
    pods.append(gated)
    run.settle(caller.prober, vip, pods)
    run.log("gate open", f"200 connections to the cluster IP: {caller.prober.tcp(vip, 200)}")

    with _balancer(lab) as balancer:
        lab.until(lambda: rotation(balancer) == addresses(pods), "the load balancer uses the pods")
        ungated, pods = _rollout(lab, pods, balancer, wait=False)
        lab.until(lambda: rotation(balancer) == addresses(pods), "the load balancer uses the new pods")
        waited, _ = _rollout(lab, pods, balancer, wait=True)
    for label, result in (("without a gate", ungated), ("with a gate", waited)):
        run.log(label, f"through the load balancer {result.total} connections, {result.failed} failed")
    expect(ungated.failed > 0, "failed connections in the rollout without a gate", ungated)
    expect(not waited.failed, "no failed connection in the rollout with a gate", waited)


@contextmanager
def _balancer(lab: Lab) -> Iterator[Path]:
    """Run a load balancer outside the cluster that applies changes late; yield its log file."""
    path = lab.logs / "balancer.log"
    api = lab.api.url.removeprefix("http://")
    command = workload("default/web", "--api", api, "--delay", str(BALANCER_DELAY), "--before-ready")
    with path.open("wb") as errors:
        process = lab.network.fabric.spawn(command, output=subprocess.DEVNULL, errors=errors)
    try:
        yield path
    finally:
        process.terminate()
        process.wait()


def _rollout(lab: Lab, old: list[LabPod], balancer: Path, *, wait: bool) -> tuple[ProbeResult, list[LabPod]]:
    """Replace all pods while connections go through the load balancer, and wait for it at each step or not."""
    stream = lab.outside.prober.stream(BALANCER)
    new = lab.deploy("web", len(old), gates=[GATE] if wait else [], linger=LINGER)
    if wait:
        lab.until(lambda: addresses(new) <= rotation(balancer), "the load balancer uses the new pods")
        for pod in new:
            pod.open_gate(GATE)
    for pod in old:
        pod.mark_terminating()
    if wait:
        lab.until(lambda: not addresses(old) & rotation(balancer), "the load balancer dropped the old pods")
    for pod in old:
        pod.terminate()
    for pod in old:
        lab.remove_pod(pod)
    if not wait:
        lab.until(lambda: rotation(balancer) == addresses(new), "the load balancer uses the new pods")
    return stream.stop(), new
