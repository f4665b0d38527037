"""What a client of a Service sees when something is wrong, and the command that names the cause."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from pykubeproxy.lab import faults
from pykubeproxy.lab.agents import node_environment
from pykubeproxy.lab.api import SERVICES, in_namespace
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import OUTSIDE
from pykubeproxy.lab.prober import Prober, ProbeTarget
from pykubeproxy.lab.scenarios.scenario import Run, expect, expect_errors, run_on_node, scenario

CONNECTIONS = 3
#: Seconds to wait for an answer, which takes milliseconds in the lab.
TIMEOUT = 0.2
REQUESTS = 50
#: With three pods, the probability that so many connections reach one pod by chance is below 1e-9.
MANY = 20


@scenario(
    "Symptom: connection refused",
    why="Without ready endpoints, a rule refuses. If trace names endpoints, the pod itself refuses.",
    command="pykubeproxy explain default/unready",
)
def refused(run: Run) -> None:
    """Connect to a Service whose pod is not ready, and to one whose pods do not listen on the target port."""
    lab = run.lab
    caller, web = *lab.deploy("caller", 1), *lab.deploy("web", 1)
    (pod,) = lab.deploy("unready", 1)
    pod.set_answering(False)
    unready = lab.service("unready").vip()
    wrong = lab.service("wrong-port", selector={"app": "web"}, ports=[{"port": 80, "targetPort": 9090}]).vip()
    address = caller.addresses[0]

    _expect_error(run, "unready pod", caller.prober, unready, "refused")
    run.inspect("node1", f"trace {address} {unready}", "default/unready has no endpoints")
    run.inspect(
        "node1", "explain default/unready", f"- {pod.target()} on {pod.site.name} ({pod.name}): not ready"
    )

    _expect_error(run, "wrong port", caller.prober, wrong, "refused")
    run.inspect("node1", f"trace {address} {wrong}", f"100% {web.addresses[0]}:9090")
    direct = caller.prober.tcp(ProbeTarget(web.addresses[0], 9090), CONNECTIONS)
    expect_errors(direct, "refused")
    run.log("", f"without the Service, {CONNECTIONS} connections to the pod: {direct}")


@scenario(
    "Symptom: time-out",
    why="Rules drop packets without an answer. trace names the rule, one of the proxy or of others.",
    command="pykubeproxy trace 203.0.113.10 10.0.0.11:NODEPORT",
)
def time_out(run: Run) -> None:
    """Connect to a node without endpoints, from outside the source ranges, and through a DROP rule of a firewall."""
    lab = run.lab
    caller, pod = *lab.deploy("caller", 1, nodes=["node1"]), *lab.deploy("web", 1, nodes=["node2"])
    service = lab.service("web", type="LoadBalancer", externalTrafficPolicy="Local")
    node1, node2 = lab.nodes["node1"], lab.nodes["node2"]
    client, outside = lab.outside.prober, OUTSIDE[0]
    lab.until(lambda: not client.tcp(node2.node_port(service)).failed, "the node port of node2 answers")

    target = node1.node_port(service)
    _expect_error(run, "policy Local", client, target, "timed out")
    run.inspect("node1", f"trace {outside} {target}", "default/web has no local endpoints")

    target = _set_source_ranges(lab, node2.addresses[0])
    _expect_error(run, "source ranges", client, target, "timed out")
    run.inspect("node2", f"trace {outside} {target}", "in filter KUBE-PROXY-FIREWALL")
    run.inspect("node2", "explain default/web", "open only to 10.0.0.0/8")

    with _drop_rule(lab, "node1", pod.addresses[0]):
        _expect_error(run, "firewall", caller.prober, service.vip(), "timed out")
        rule = f"dropped: -d {pod.addresses[0]}/32 -j DROP"
        run.inspect("node1", f"trace {caller.addresses[0]} {service.vip()}", rule)


def _set_source_ranges(lab: Lab, address: str) -> ProbeTarget:
    """Give the Service `web` a load balancer IP that is closed to the outside client; return its address and port."""
    status = {"loadBalancer": {"ingress": [{"ip": address}]}}
    lab.change_service("web", loadBalancerSourceRanges=["10.0.0.0/8"])
    lab.api.call("PATCH", f"{in_namespace(SERVICES, 'default')}/web/status", {"status": status})
    return ProbeTarget(address, 80)


@contextmanager
def _drop_rule(lab: Lab, node: str, destination: str) -> Iterator[None]:
    """Drop forwarded packets to an address, as a firewall would."""
    tool = "iptables" if lab.backend == "auto" else f"iptables-{lab.backend}"

    def change(option: str) -> None:
        command = [tool, "-w", option, "FORWARD", "-d", destination, "-j", "DROP"]
        with lab.nodes[node].namespace.entered():
            subprocess.run(command, check=True, env=node_environment(lab.logs, node))

    change("-I")
    try:
        yield
    finally:
        change("-D")


def _expect_error(run: Run, label: str, prober: Prober, target: ProbeTarget, error: str) -> None:
    """Wait for an error, then expect it for several connections, and log them."""

    def failed() -> bool:
        return prober.tcp(target, timeout=TIMEOUT).errors[error] == 1

    run.lab.until(failed, f"{target}: {error}")
    result = prober.tcp(target, CONNECTIONS, timeout=TIMEOUT)
    expect_errors(result, error)
    run.log(label, f"{CONNECTIONS} connections: {result}")


@scenario(
    "Symptom: uneven balancing",
    why="Rules choose an endpoint for each connection, by chance. Policies and affinity limit the choice.",
    command="pykubeproxy dump-rules default/web",
)
def uneven(run: Run) -> None:
    """Connect with policy Local and unequal nodes, with session affinity, and with one connection for all requests."""
    lab = run.lab
    pods = lab.deploy("web", 3)
    service = lab.service("web", type="NodePort", externalTrafficPolicy="Local")
    client = lab.outside.prober
    node1, node2 = (node.node_port(service) for node in lab.nodes.values())
    alone = pods[1]
    run.settle(client, node1, [pods[0], pods[2]])
    run.settle(client, node2, [alone])

    result = client.tcp(node1, REQUESTS) + client.tcp(node2, REQUESTS)
    expect(result.pods[alone.name] == REQUESTS, f"{REQUESTS} connections for {alone.name}", result)
    run.log("policy Local", f"{REQUESTS} connections to each node: {result}")
    run.inspect(
        "node2", "explain default/web --family ipv4", f"100% {alone.target()} on node2 ({alone.name}): ready"
    )

    lab.change_service("web", externalTrafficPolicy="Cluster", sessionAffinity="ClientIP")
    lab.until(lambda: len(client.tcp(node1, MANY).pods) == 1, "one pod answers a client")
    result = client.tcp(node1, REQUESTS)
    expect(len(result.pods) == 1, "one pod for all connections of a client", result)
    run.log("affinity", f"{REQUESTS} connections: {result}")
    run.inspect("node1", "dump-rules default/web", "session affinity for 3 h")

    vip = lab.service("keep-alive", selector={"app": "web"}).vip()
    node = lab.nodes["node1"].prober
    lab.until(lambda: not node.tcp(vip).failed, f"{vip} answers")  # the first connection
    result = node.requests(vip, REQUESTS)  # the second one
    expect(len(result.pods) == 1 and not result.failed, "one pod for all requests of a connection", result)
    run.log("keep-alive", f"{REQUESTS} requests on one connection: {result}")
    text = run_on_node(lab, "node1", "dump-rules default/keep-alive --family ipv4").text
    counted = sum(map(int, re.findall(r"(\d+) packets?", text)))
    expect(counted == 2, "2 connections in the counters of the rules", text)
    run.log("on node1", "pykubeproxy dump-rules default/keep-alive")
    run.log("", "→ the rules have chosen an endpoint for 2 connections only")


#: Of a fault: the exit code of trace, and the sentence in which it names the cause.
_NAMED = {
    "link": (3, "between node1 and node2 (routes, VXLAN, security groups)"),
    "port": (3, "reached node2, but nothing listens at"),
    "nftables": (1, "node2 drops its packets (inet lab-fault forward)"),
}


@scenario(
    "Symptom: any, and the cause on the wire",
    why="trace --live sends probes along the rules, and names the place where reality differs from them.",
    command="pykubeproxy trace --live CLIENT CLUSTER-IP:80",
)
def probes(run: Run) -> None:
    """Break the path to a pod in three ways, and let probes find out where: between nodes, in the pod, in a firewall."""
    lab = run.lab
    (caller,), pods = lab.deploy("caller", 1, nodes=["node1"]), lab.deploy(faults.APP, 1, nodes=["node2"])
    vip = lab.service(faults.APP).vip()
    command = f"trace --live pod/{caller.name} svc/{faults.APP} --count {CONNECTIONS}"
    for name, (code, cause) in _NAMED.items():
        run.settle(caller.prober, vip, pods)
        fault = next(fault for fault in faults.FAULTS if fault.name == name)
        run.log(f"break {name}", fault.title)
        faults.break_lab(lab, fault)
        try:
            lab.until(lambda: caller.prober.tcp(vip, timeout=TIMEOUT).failed > 0, f"{vip} fails")
            run.inspect_cluster(command, cause, code)
        finally:
            faults.mend(lab)
    run.settle(caller.prober, vip, pods)
    run.inspect_cluster(command, f"{CONNECTIONS} of {CONNECTIONS} connections arrived")
