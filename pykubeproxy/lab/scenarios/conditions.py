"""Endpoint conditions: ready, serving, terminating, and Services that do not care."""

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.scenarios.scenario import (
    Say,
    Scenario,
    expect_all,
    expect_even,
    expect_only,
    settle,
)


def conditions(lab: Lab, say: Say) -> None:
    """Unready pods get nothing unless told otherwise; terminating ones serve when no other is left."""
    (caller,) = lab.deploy("caller", 1)
    pods = lab.deploy("web", 3)
    vip = lab.service("web").vip()
    prober = caller.prober

    pods[1].set_answering(False)
    settle(lab, prober, vip, [pods[0], pods[2]])
    seen = prober.tcp(vip, 300)
    expect_even(seen, [pods[0], pods[2]])
    say(f"{pods[1].name} unready", f"300 connections: {seen}")

    lab.change_service("web", publishNotReadyAddresses=True)
    settle(lab, prober, vip, pods)
    seen = prober.tcp(vip, 300)
    expect_even(seen, pods)
    say("published", f"300 connections: {seen}")

    lab.change_service("web", publishNotReadyAddresses=False)
    for pod in pods:
        pod.set_answering(False)
    lab.until(lambda: prober.tcp(vip).errors["refused"] == 1, "nobody answers")
    seen = prober.tcp(vip, 20)
    expect_all(seen, "refused")
    say("all unready", f"20 connections: {seen}")

    for pod in pods:
        pod.set_answering(True)
    for pod in pods[:2]:
        pod.mark_terminating()
    settle(lab, prober, vip, pods[2:])
    seen = prober.tcp(vip, 200)
    expect_only(seen, pods[2:])
    say("2 terminating", f"200 connections: {seen}")
    pods[2].mark_terminating()
    settle(lab, prober, vip, pods)
    seen = prober.tcp(vip, 300)
    expect_even(seen, pods)
    say("3 terminating", f"300 connections: {seen}")


SCENARIOS = (
    Scenario(
        "conditions",
        "Unready and terminating pods",
        "Pods turn unready, are published all the same, and end up terminating.",
        "Ready endpoints are used; with none, those that still serve while terminating.",
        "pykubeproxy dump-rules default/web",
        conditions,
    ),
)
