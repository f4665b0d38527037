"""Connections from outside: node ports under both policies, and an ingress controller behind one."""

import sys
from pathlib import Path

from pykubeproxy.lab import ingress as ingress_program
from pykubeproxy.lab.agents import Agent
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT
from pykubeproxy.lab.pods import Pod
from pykubeproxy.lab.prober import Target
from pykubeproxy.lab.scenarios.scenario import Say, Scenario, expect, expect_all, names

CONNECTIONS = 50


def node_port(lab: Lab, say: Say) -> None:
    """NodePort with externalTrafficPolicy Cluster and Local."""
    lab.deploy("web", 2, nodes=["node1"])
    cluster = lab.service("web", type="NodePort")
    local = lab.service("web-local", type="NodePort", externalTrafficPolicy="Local", selector={"app": "web"})
    for family in (4, 6):
        for name, node in lab.nodes.items():
            address = node.addresses[family == 6]
            clients = _clients(lab, node.node_port(cluster, family), address)
            say(f"Cluster, IPv{family}", f"through {name} the pods see {clients}")
    for family in (4, 6):
        node1, node2 = lab.nodes["node1"], lab.nodes["node2"]
        clients = _clients(lab, node1.node_port(local, family), CLIENT[family == 6])
        say(f"Local, IPv{family}", f"through node1 the pods see {clients}")
        seen = lab.client.prober.tcp(node2.node_port(local, family), 3, timeout=0.3)
        expect_all(seen, "timeout")
        say("", f"through node2, which has no pod: {seen}")


def _clients(lab: Lab, target: Target, expected: str) -> str:
    """Whom the pods see, which has to be the expected address alone."""
    lab.until(lambda: not lab.client.prober.tcp(target).failed, f"{target} answers")
    seen = lab.client.prober.tcp(target, CONNECTIONS)
    clients = ", ".join(sorted(seen.clients))
    expect(not seen.failed and clients == expected, f"the pods to see {expected}", f"{clients}, {seen}")
    return clients


def ingress(lab: Lab, say: Say) -> None:
    """A controller that watches endpoints itself, behind a node port with policy Local."""
    pods = lab.deploy("web", 3)
    lab.service("web")
    controller = lab.start_pod("ingress-1", "ingress", "node1", _controller_command(lab))
    controller.wait_answering()
    service = lab.service("ingress", type="NodePort", externalTrafficPolicy="Local")
    target = lab.nodes["node1"].node_port(service)
    lab.until(lambda: not lab.client.prober.tcp(target, 3).failed, f"{target} answers")
    _round_robin(lab, say, target, pods, "3 pods")

    already = {name: len(agent.log()) for name, agent in lab.agents.items()}
    (new,) = lab.deploy("web", 1)
    old = pods.pop(0)
    lab.stop_pod(old)
    lab.until(lambda: _in_rotation(controller, [*pods, new]), "the controller follows")
    _round_robin(lab, say, target, [*pods, new], "one replaced")
    for address, last_word in ((str(old.target()), "endpoint went"), (str(new.target()), "used: ready")):
        _shows(say, "its log", controller.log.read_text(), address)
        for name, agent in lab.agents.items():
            _wait_for(lab, agent, already[name], address, last_word)
        _shows(say, "node1's log", lab.agents["node1"].log()[already["node1"] :], address)


def _wait_for(lab: Lab, agent: Agent, already: int, address: str, last_word: str) -> None:
    def says_so() -> bool:
        return any(address in line and last_word in line for line in agent.log()[already:].splitlines())

    lab.until(says_so, f'{agent.log_file} says "{last_word}" of {address}')


def _shows(say: Say, where: str, log: str, address: str) -> None:
    """Show the last line of a log that names the address as one that came or went."""
    told = [line for line in log.splitlines() if address in line and "rotation" not in line]
    expect(bool(told), f"{where} to name {address}", log[-500:])
    say(where, told[-1].partition("] ")[2] or told[-1].partition(" ")[2])


def _controller_command(lab: Lab) -> list[str]:
    program = str(Path(ingress_program.__file__))
    api = lab.api.url.removeprefix("http://")
    return [sys.executable, "-I", "-S", program, "--api", api, "--service", "default/web"]


def _in_rotation(controller: Pod, pods: list[Pod]) -> bool:
    lines = [line for line in controller.log.read_text().splitlines() if "in rotation" in line]
    listed = lines[-1].partition("in rotation: ")[2].split(", ") if lines else []
    return sorted(listed) == sorted(str(pod.target()) for pod in pods)


def _round_robin(lab: Lab, say: Say, target: Target, pods: list[Pod], what: str) -> None:
    seen = lab.client.prober.tcp(target, 100)
    say(what, f"100 connections: {seen}")
    expect(not seen.failed and set(seen.pods) == names(pods), "answers from the three pods", seen)
    expect(sorted(seen.pods.values()) == [33, 33, 34], "34, 33 and 33 connections", seen)
    expect(set(seen.real_ips) == {CLIENT[0]}, f"X-Real-IP {CLIENT[0]}", dict(seen.real_ips))
    say("", f"X-Real-IP of all: {CLIENT[0]}, the client's own")


SCENARIOS = (
    Scenario(
        "node-port",
        "NodePort with externalTrafficPolicy Cluster and Local",
        "The outside client connects to both nodes; all pods are on node1.",
        "Cluster masquerades, as the pod may be elsewhere; Local never leaves the node, so need not.",
        "pykubeproxy dump-rules default/web-local",
        node_port,
    ),
    Scenario(
        "ingress",
        "An ingress controller behind a node port with policy Local",
        "It watches endpoints itself and goes to the pods directly, in turn.",
        "Local keeps the client's address on the way to the controller, which hands it on.",
        "pykubeproxy dump-rules default/ingress",
        ingress,
    ),
)
