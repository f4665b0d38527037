"""Who gets a new connection: a random ready pod, or with affinity the one that had the client before."""

import time

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT_CROWD
from pykubeproxy.lab.prober import Target
from pykubeproxy.lab.scenarios.chance import bounds
from pykubeproxy.lab.scenarios.scenario import (
    Say,
    Scenario,
    expect,
    expect_even,
    expect_only,
    settle,
)

AFFINITY_SECONDS = 2


def scale(lab: Lab, say: Say) -> None:
    """One deployment scaled 1 → 3 → 1."""
    (caller,) = lab.deploy("caller", 1)
    pods = lab.deploy("web", 1)
    vip = lab.service("web").vip()
    settle(lab, caller.prober, vip, pods)
    seen = caller.prober.tcp(vip, 200)
    expect_only(seen, pods)
    say("1 pod", f"200 connections: {seen}")

    pods += lab.deploy("web", 2)
    settle(lab, caller.prober, vip, pods)
    seen = caller.prober.tcp(vip, 600)
    low, high = expect_even(seen, pods)
    say("3 pods", f"600 from a pod: {seen}")
    node2 = lab.nodes["node2"].prober
    settle(lab, node2, vip, pods)
    seen = node2.tcp(vip, 600)
    expect_even(seen, pods)
    say("", f"600 from node2: {seen}")
    say("", f"chance allows each {low} to {high}, save once in a million")

    for pod in pods[1:]:
        lab.stop_pod(pod)
    after = settle(lab, caller.prober, vip, pods[:1])
    seen = caller.prober.tcp(vip, 200)
    expect_only(seen, pods[:1])
    say("1 pod again", f"200 connections: {seen} (followed within {after:.2f} s)")


def affinity(lab: Lab, say: Say) -> None:
    """ClientIP affinity keeps a client on its pod and lets it go after the timeout."""
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
    _let_go(lab)

    first = {address: _only_pod(lab, target, address, 5) for address in CLIENT_CROWD}
    used = sorted(set(first.values()))
    expect(len(used) > 1, "20 clients to be spread over the pods", ", ".join(used))
    say("held", f"20 clients, 5 connections each: every client on one pod, {len(used)} pods used")

    ends = time.monotonic() + 1.5 * AFFINITY_SECONDS
    while time.monotonic() < ends:
        for address in CLIENT_CROWD[:4]:
            pod = _only_pod(lab, target, address, 1)
            expect(pod == first[address], f"{address} to stay on {first[address]}", pod)
        time.sleep(AFFINITY_SECONDS / 8)
    say("renewed", f"4 clients that keep coming stay for {1.5 * AFFINITY_SECONDS:.0f} s")

    _let_go(lab)
    again = {address: _only_pod(lab, target, address, 2) for address in CLIENT_CROWD}
    moved = sum(again[address] != first[address] for address in CLIENT_CROWD)
    low, high = bounds(len(CLIENT_CROWD), 1 - 1 / len(pods))
    expect(low <= moved <= high, f"{low} to {high} of 20 clients on another pod", moved)
    say("let go", f"after {AFFINITY_SECONDS} quiet seconds {moved} of 20 clients are on another pod")
    say("", f"by chance: 2 of 3, between {low} and {high}")


def _let_go(lab: Lab) -> None:
    """Sit out the affinity timeout: here passing time is what is tested."""
    time.sleep(AFFINITY_SECONDS + 0.5)
    lab.check()


def _only_pod(lab: Lab, target: Target, client: str, connections: int) -> str:
    seen = lab.client.prober.tcp(target, connections, source=client)
    expect(not seen.failed and len(seen.pods) == 1, f"{client} to reach one pod", seen)
    return next(iter(seen.pods))


SCENARIOS = (
    Scenario(
        "scale",
        "A deployment scaled 1 → 3 → 1",
        "Connections to the cluster IP while pods are added and taken away.",
        "Each of n endpoints takes a new connection with probability 1/n.",
        "pykubeproxy dump-rules default/web",
        scale,
    ),
    Scenario(
        "affinity",
        "ClientIP affinity",
        f"20 clients on a node port, sessionAffinity ClientIP, timeout {AFFINITY_SECONDS} s.",
        "A pod's chain remembers its clients (-m recent); the Service's asks it before choosing.",
        "sh -c 'head /proc/net/xt_recent/KUBE-SEP-*'",
        affinity,
    ),
)
