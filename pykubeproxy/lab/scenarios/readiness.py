"""Which endpoints count as ready: conditions, rolling updates, and readiness gates with a load balancer."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT_GATEWAY
from pykubeproxy.lab.pods import Pod, workload
from pykubeproxy.lab.prober import ProbeResult, Target
from pykubeproxy.lab.scenarios.external import addresses, rotation
from pykubeproxy.lab.scenarios.scenario import Run, expect, expect_errors, expect_pods, scenario

GRACE = 1.0
BALANCER_DELAY = 1.5
BALANCER = Target(CLIENT_GATEWAY[0], 8080)
GATE = "load-balancer"


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
        "from outside": (lab.client.prober, lab.nodes["node1"].node_port(service)),
    }
    for prober, target in sources.values():
        run.settle(prober, target, old)
    streams = {source: prober.stream(target) for source, (prober, target) in sources.items()}
    new: list[Pod] = []
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
    "A load balancer and a rollout disagree: readiness gates",
    why="A pod is ready when its probe succeeds and every gate is open. Others get no traffic.",
)
def readiness_gate(run: Run) -> None:
    """Roll out pods behind a load balancer that applies changes 1.5 seconds late, without and with a gate."""
    lab = run.lab
    (caller,) = lab.deploy("caller", 1)
    pods = lab.deploy("web", 2, linger=GRACE / 2)
    vip = lab.service("web").vip()
    run.settle(caller.prober, vip, pods)

    (gated,) = lab.deploy("web", 1, gates=[GATE], linger=GRACE / 2)
    direct, through = caller.prober.tcp(gated.target(), 50), caller.prober.tcp(vip, 200)
    run.log("gate closed", f"{gated.name} answers {direct.pods[gated.name]} of 50 direct connections")
    run.log("", f"200 connections to the VIP: {through}")
    expect(direct.pods[gated.name] == 50, "the gated pod to answer direct connections", direct)
    expect_pods(through, pods)
    gated.open_gate(GATE)
    pods.append(gated)
    run.settle(caller.prober, vip, pods)
    run.log("gate open", f"200 connections to the VIP: {caller.prober.tcp(vip, 200)}")

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


def _rollout(lab: Lab, old: list[Pod], balancer: Path, *, wait: bool) -> tuple[ProbeResult, list[Pod]]:
    """Replace all pods while connections go through the load balancer, and wait for it at each step or not."""
    stream = lab.client.prober.stream(BALANCER)
    new = lab.deploy("web", len(old), gates=[GATE] if wait else [], linger=GRACE / 2)
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
