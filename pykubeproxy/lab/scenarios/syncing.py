"""When rules follow changes: an agent that is stopped, and the minimum sync period."""

import time

from pykubeproxy.lab.scenarios.scenario import Run, bounds, expect, expect_pods, names, scenario

MIN_SYNC = 5.0
CHANGES = 20


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
