"""An agent that is away, and one that is told to take its time."""

import time

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.scenarios.chance import bounds
from pykubeproxy.lab.scenarios.scenario import Say, Scenario, expect, expect_only, names, settle

MIN_SYNC = 5.0
CHANGES = 20


def agent_stopped(lab: Lab, say: Say) -> None:
    """Without its agent a node's rules stand still; with it they follow."""
    (caller,) = lab.deploy("caller", 1, nodes=["node1"])
    pods = lab.deploy("web", 3)
    vip = lab.service("web").vip()
    node2 = lab.nodes["node2"].prober
    settle(lab, caller.prober, vip, pods)
    settle(lab, node2, vip, pods)

    agent = lab.agents["node1"]
    code = agent.stop()
    expect(code == 0, "the agent to end with exit code 0", code)
    try:
        (new,) = lab.deploy("web", 1)
        lab.stop_pod(pods[0])
        now = [*pods[1:], new]
        seen = caller.prober.tcp(vip, 300)
        say("agent stopped", f"{pods[0].name} replaced by {new.name}; 300 connections on node1:")
        say("", seen)
        low, high = bounds(300, 1 / 3)
        expect(low <= seen.failed <= high, f"{low} to {high} connections to fail", seen)
        expect(set(seen.pods) == names(pods[1:]), "the other two pods and not the new one", seen)
        settle(lab, node2, vip, now)
        seen = node2.tcp(vip, 300)
        expect_only(seen, now)
        say("meanwhile", f"node2, whose agent runs: {seen}")
    finally:
        agent.start()
    after = settle(lab, caller.prober, vip, now)
    seen = caller.prober.tcp(vip, 300)
    expect_only(seen, now)
    say("started again", f"{seen} ({after:.2f} s after its start)")


def min_sync(lab: Lab, say: Say) -> None:
    """Twenty changes within minSyncPeriod give two restores."""
    (caller,) = lab.deploy("caller", 1, nodes=["node1"])
    pods = lab.deploy("web", 3)
    vip = lab.service("web", ipFamilyPolicy="SingleStack", ipFamilies=["IPv4"]).vip()
    settle(lab, caller.prober, vip, pods)
    agent = lab.agents["node1"]
    agent.stop()
    pods[2].set_answering(False)  # something to write at its start, which tells when that was
    begun = time.time()
    agent.start({"iptables": {"minSyncPeriod": f"{MIN_SYNC:.0f}s"}})
    try:
        settle(lab, caller.prober, vip, pods[:2])
        quiet = MIN_SYNC + 0.5
        lab.until(lambda: time.time() > max(agent.restores(since=begun)) + quiet, "quiet")
        started = time.time()
        for change in range(CHANGES - 1):
            pods[2].set_answering(change % 2 == 0)
            time.sleep(0.05)
        pods[0].set_answering(False)  # the last of them
        changed = time.time()
        followed = settle(lab, caller.prober, vip, pods[1:])
        lab.until(lambda: time.time() > started + MIN_SYNC + 1.5, "the time is over")
        restores = [when - started for when in agent.restores(since=started)]
    finally:
        agent.restart()
    say("changed", f"{CHANGES} times within {changed - started:.1f} s")
    say("restores", f"{len(restores)}, after " + " and ".join(f"{when:.2f} s" for when in restores))
    say("VIP followed", f"{followed:.2f} s after the last change")
    expect(len(restores) == 2, "two restores", len(restores))
    first, second = restores
    late = changed + followed - started - second
    expect(first < MIN_SYNC / 2, "the first at once", f"{first:.2f} s")
    expect(second - first > MIN_SYNC - 0.5, "the second after the period", f"{second - first:.2f} s later")
    expect(late < MIN_SYNC / 2, "the VIP to follow the second at once", f"{late:.2f} s later")


SCENARIOS = (
    Scenario(
        "agent-stopped",
        "The agent of a node is stopped",
        "One of three pods is replaced while node1 has no agent; then it is started again.",
        "The rules stay when the agent goes, and nobody takes the dead pod out of them.",
        "pykubeproxy dump-rules default/web",
        agent_stopped,
    ),
    Scenario(
        "min-sync",
        f"Many changes within minSyncPeriod ({MIN_SYNC:.0f} s)",
        "A pod turns ready and unready over and over; the lab counts calls of iptables-restore.",
        "The first change is written at once, what follows is gathered until the period is over.",
        "grep synced in the agent's log, node1.log in the lab's logs",
        min_sync,
    ),
)
