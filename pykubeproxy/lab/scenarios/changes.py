"""How rules follow changes: of readiness, in a rolling update, without an agent, within minSyncPeriod."""

import time

from pykubeproxy.lab.pods import Pod
from pykubeproxy.lab.scenarios.scenario import (
    Run,
    bounds,
    expect,
    expect_errors,
    expect_pods,
    names,
    scenario,
)

GRACE = 1.0
MIN_SYNC = 5.0
CHANGES = 20


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
        expect(result.errors["timeout"] > 0, "time-outs without the network of the removed pod", result)
        run.log("network gone", f"40 connections on node1: {result}")
        run.inspect_cluster("diff --all-nodes --sync-period 1", "node1: 1 wrong Service default/web:tcp", 1)
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
    run.log("VIP followed", f"{followed:.2f} s after the last change")
    expect(len(restores) == 2, "two restores", len(restores))
    first, second = restores
    late = changed + followed - started - second
    expect(first < MIN_SYNC / 2, "the first restore at once", f"{first:.2f} s")
    expect(second - first > MIN_SYNC - 0.5, "the second after the period", f"{second - first:.2f} s later")
    expect(late < MIN_SYNC / 2, "the VIP to follow the second restore at once", f"{late:.2f} s later")
