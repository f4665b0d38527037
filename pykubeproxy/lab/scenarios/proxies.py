"""Reverse proxies that follow EndpointSlices: an ingress controller, and a load balancer with readiness gates."""

import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pykubeproxy.lab.agents import Agent
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT, CLIENT_GATEWAY
from pykubeproxy.lab.pods import Pod, workload
from pykubeproxy.lab.prober import ProbeResult, Target
from pykubeproxy.lab.scenarios.scenario import Run, expect, expect_pods, scenario

LINGER = 0.5
BALANCER_DELAY = 1.5
BALANCER = Target(CLIENT_GATEWAY[0], 8080)
GATE = "load-balancer"


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
    lab.until(lambda: not lab.client.prober.tcp(target, 3).failed, f"{target} answers")
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


def _wait_for_event(lab: Lab, agent: Agent, offset: int, address: str, event: str) -> None:
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


def _expect_round_robin(run: Run, label: str, target: Target, pods: list[Pod]) -> None:
    result = run.lab.client.prober.tcp(target, 100)
    run.log(label, f"100 connections: {result}")
    expect_pods(result, pods)
    expect(sorted(result.pods.values()) == [33, 33, 34], "34, 33 and 33 connections", result)
    expect(set(result.real_ips) == {CLIENT[0]}, f"X-Real-IP {CLIENT[0]}", dict(result.real_ips))
    run.log("", f"X-Real-IP of all: {CLIENT[0]}, the client's own")


def addresses(pods: Iterable[Pod]) -> set[str]:
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
