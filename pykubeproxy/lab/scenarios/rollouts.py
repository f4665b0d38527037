"""Pods are replaced while connections keep coming."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pykubeproxy.lab import ingress
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.network import CLIENT_GATEWAY
from pykubeproxy.lab.pods import Pod
from pykubeproxy.lab.prober import Seen, Stream, Target
from pykubeproxy.lab.scenarios.scenario import Say, Scenario, expect, expect_only, names, settle

GRACE = 1.0
BALANCER_DELAY = 1.5
BALANCER = Target(CLIENT_GATEWAY[0], 8080)
GATE = "outside-balancer"


def rolling_update(lab: Lab, say: Say) -> None:
    """Start new, mark ready, mark old terminating, stop: no connection fails."""
    (caller,) = lab.deploy("caller", 1, nodes=["node1"])
    old = lab.deploy("web", 3, linger=GRACE)
    service = lab.service("web", type="NodePort")
    vip, outside = service.vip(), lab.nodes["node1"].node_port(service)
    for prober, target in (
        (caller.prober, vip),
        (lab.nodes["node2"].prober, vip),
        (lab.client.prober, outside),
    ):
        settle(lab, prober, target, old)
    streams = {
        "from a pod": caller.prober.stream(vip),
        "from node2": lab.nodes["node2"].prober.stream(vip),
        "from outside": lab.client.prober.stream(outside),
    }
    new = []
    for pod in old:
        new += lab.deploy("web", 1, linger=GRACE)
        lab.stop_pod(pod)
    settle(lab, caller.prober, vip, new)
    for where, seen in _stopped(streams).items():
        say(where, f"{seen.total} connections, {seen.failed} failed, {len(seen.pods)} pods answered")
        expect(not seen.failed, "no connection to fail", seen)
        expect(set(seen.pods) == names([*old, *new]), "all old and new pods to have served", seen)
    seen = caller.prober.tcp(vip, 100)
    expect_only(seen, new)
    say("afterwards", f"100 connections: {seen}")


def _stopped(streams: dict[str, Stream]) -> dict[str, Seen]:
    return {where: stream.stop() for where, stream in streams.items()}


def readiness_gate(lab: Lab, say: Say) -> None:
    """A closed gate keeps a pod out; a rollout that waits for its balancer loses nothing."""
    (caller,) = lab.deploy("caller", 1)
    pods = lab.deploy("web", 2, linger=GRACE / 2)
    vip = lab.service("web").vip()
    settle(lab, caller.prober, vip, pods)

    (gated,) = lab.deploy("web", 1, gates=[GATE], linger=GRACE / 2)
    direct, through = caller.prober.tcp(gated.target(), 50), caller.prober.tcp(vip, 200)
    say("gate closed", f"{gated.name} asked directly answers {direct.pods[gated.name]} of 50")
    say("", f"200 connections to the VIP: {through}")
    expect(direct.pods[gated.name] == 50, "the gated pod to answer when asked directly", direct)
    expect_only(through, pods)
    gated.open_gate(GATE)
    pods.append(gated)
    settle(lab, caller.prober, vip, pods)
    say("gate open", f"200 connections to the VIP: {caller.prober.tcp(vip, 200)}")

    with _balancer(lab) as log:
        lab.until(lambda: _rotation(log) == _addresses(pods), "the balancer has the pods")
        hasty, pods = _rollout(lab, pods, log, wait=False)
        lab.until(lambda: _rotation(log) == _addresses(pods), "the balancer has the new pods")
        patient, _ = _rollout(lab, pods, log, wait=True)
    for what, seen in (("not waiting", hasty), ("waiting", patient)):
        say(what, f"through the balancer {seen.total} connections, {seen.failed} lost")
    expect(hasty.failed > 0, "the rollout that does not wait to lose connections", hasty)
    expect(not patient.failed, "the rollout that waits to lose none", patient)


@contextmanager
def _balancer(lab: Lab) -> Iterator[Path]:
    """A balancer outside of the cluster that is slow to take up changes; gives its log."""
    log = lab.logs / "balancer.log"
    command = [sys.executable, "-I", "-S", str(Path(ingress.__file__)), "--before-ready"]
    command += ["--api", lab.api.url.removeprefix("http://"), "--service", "default/web"]
    command += ["--port", str(BALANCER.port), "--delay", str(BALANCER_DELAY)]
    with log.open("wb") as errors:
        process = lab.network.fabric.spawn(command, output=subprocess.DEVNULL, errors=errors)
    try:
        yield log
    finally:
        process.terminate()
        process.wait()


def _rotation(log: Path) -> set[str]:
    """The addresses that the balancer has in rotation now."""
    lines = [line for line in log.read_text().splitlines() if "in rotation: " in line]
    return set(lines[-1].partition("in rotation: ")[2].split(", ")) if lines else set()


def _addresses(pods: list[Pod]) -> set[str]:
    return {str(pod.target()) for pod in pods}


def _rollout(lab: Lab, old: list[Pod], log: Path, *, wait: bool) -> tuple[Seen, list[Pod]]:
    """All pods replaced under a stream through the balancer: new ones first, then the old ones go."""
    stream = lab.client.prober.stream(BALANCER)
    new = lab.deploy("web", len(old), gates=[GATE] if wait else [], linger=GRACE / 2)
    if wait:
        lab.until(lambda: _addresses(new) <= _rotation(log), "the balancer has the new pods")
        for pod in new:
            pod.open_gate(GATE)
    for pod in old:
        pod.mark_terminating()
    if wait:
        lab.until(lambda: not _addresses(old) & _rotation(log), "the balancer has let go of the old pods")
    for pod in old:
        pod.terminate()
    for pod in old:
        lab.remove_pod(pod)
    if not wait:
        lab.until(lambda: _rotation(log) == _addresses(new), "the balancer has the new pods")
    return stream.stop(), new


SCENARIOS = (
    Scenario(
        "rolling-update",
        "A rolling update under constant connections",
        "For each pod: start a new one, wait until it is ready, then let the old one go.",
        f"The rules let go of a terminating pod long before its grace ({GRACE:.0f} s) is over.",
        "pykubeproxy dump-rules default/web",
        rolling_update,
    ),
    Scenario(
        "readiness-gate",
        "A readiness gate and a slow outside balancer",
        f"A balancer that goes to pods directly takes up changes {BALANCER_DELAY} s late.",
        "Ready means: the container says so and every gate is open. Nobody else gets traffic.",
        "pykubeproxy dump-rules default/web",
        readiness_gate,
    ),
)
