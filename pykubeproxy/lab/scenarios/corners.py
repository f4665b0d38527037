"""UDP, IPv6, a pod that reaches itself, and a Service with nobody behind it."""

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.places import Place, Service
from pykubeproxy.lab.prober import Prober, Target
from pykubeproxy.lab.scenarios.scenario import (
    Say,
    Scenario,
    expect,
    expect_all,
    expect_even,
    settle,
)

#: Refused "at once": a time-out would take a second, an answer takes a few milliseconds.
AT_ONCE = 0.25


def corners(lab: Lab, say: Say) -> None:
    """UDP and IPv6, hairpin, no endpoints."""
    (caller,) = lab.deploy("caller", 1)
    pods = lab.deploy("web", 3)
    web = lab.service("web", protocols=("TCP", "UDP"))
    (single,) = lab.deploy("self", 1)
    itself = lab.service("self")
    nobody = lab.service("nobody", protocols=("TCP", "UDP"), type="NodePort")

    for family in (4, 6):
        settle(lab, caller.prober, web.vip(family), pods)
        seen = caller.prober.udp(web.vip(family), 300)
        expect_even(seen, pods)
        say(f"UDP, IPv{family}", f"300 datagrams: {seen}")
    seen = caller.prober.tcp(web.vip(6), 300)
    expect_even(seen, pods)
    say("TCP, IPv6", f"300 connections: {seen}")

    node = lab.nodes[single.identity.node]
    for family in (4, 6):
        settle(lab, single.prober, itself.vip(family), [single])
        seen = single.prober.tcp(itself.vip(family), 30)
        address = node.addresses[family == 6]
        expect(set(seen.clients) == {address}, f"the pod to see {address}", dict(seen.clients))
        say(f"hairpin, IPv{family}", f"30 connections: {seen}; it sees its node, {address}")

    _refused(lab, say, nobody, caller.prober, lab.nodes["node2"])


def _refused(lab: Lab, say: Say, nobody: Service, caller: Prober, node: Place) -> None:
    ways: list[tuple[str, Prober, Target]] = []
    for family in (4, 6):
        ways.append((f"pod, IPv{family}", caller, nobody.vip(family)))
        ways.append((f"node, IPv{family}", node.prober, nobody.vip(family)))
        ways.append((f"outside, IPv{family}", lab.client.prober, node.node_port(nobody, family)))
    slowest = max(_refusal(lab, where, prober, target) for where, prober, target in ways)
    say("no endpoints", "refused from a pod, a node and outside, over both families")
    say("", f"the slowest refusal took {slowest * 1000:.2f} ms")


def _refusal(lab: Lab, where: str, prober: Prober, target: Target) -> float:
    """Connections and datagrams are refused; returns the slowest refusal in seconds."""
    lab.until(lambda: prober.tcp(target).errors["refused"] == 1, f"{where}: refused")
    seen = prober.tcp(target, 5) + prober.udp(target, 5)
    expect_all(seen, "refused")
    expect(seen.slowest < AT_ONCE, "a refusal at once", f"{where}: {seen.slowest:.3f} s")
    return seen.slowest


SCENARIOS = (
    Scenario(
        "corners",
        "UDP, IPv6, hairpin, and a Service without endpoints",
        "Both protocols, both families, a pod that calls itself, nobody at home.",
        "A pod behind its own VIP is masqueraded; a Service without endpoints gets a REJECT.",
        "pykubeproxy dump-rules default/nobody",
        corners,
    ),
)
