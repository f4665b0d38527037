"""Connections from outside: the client address by externalTrafficPolicy, and an ingress controller."""

import re
from collections.abc import Iterable
from pathlib import Path

from pykubeproxy.lab.agents import Agent
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT
from pykubeproxy.lab.pods import Pod, workload
from pykubeproxy.lab.prober import Target
from pykubeproxy.lab.scenarios.scenario import Run, expect, expect_errors, expect_pods, scenario

CONNECTIONS = 50


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
    for family in (4, 6):
        node1, node2 = lab.nodes["node1"], lab.nodes["node2"]
        clients = _clients(lab, node1.node_port(local, family), CLIENT[family == 6])
        run.log(f"Local, IPv{family}", f"through node1 the pods see {clients}")
        result = lab.client.prober.tcp(node2.node_port(local, family), 3, timeout=0.3)
        expect_errors(result, "timeout")
        run.log("", f"through node2, which has no pod: {result}")


def _clients(lab: Lab, target: Target, expected: str) -> str:
    """Expect one client address at the pods, and return it."""
    lab.until(lambda: not lab.client.prober.tcp(target).failed, f"{target} answers")
    result = lab.client.prober.tcp(target, CONNECTIONS)
    clients = ", ".join(sorted(result.clients))
    expect(not result.failed and clients == expected, f"client address {expected}", f"{clients}, {result}")
    return clients


@scenario(
    "An ingress controller notices a changed pod address",
    why="It watches EndpointSlices, as the agent does. Local keeps the client's address up to it.",
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
