"""The hand-overs. Each begins and ends with one running agent whose rules are in place."""

import random
import time
from collections.abc import Callable

from pykubeproxy.kernel import Backend
from pykubeproxy.lab.apiserver.write import merged
from tests.handover.kube_proxy import KubeProxy
from tests.handover.node import Node

HandOver = Callable[[Node, KubeProxy, random.Random], None]


def restart(node: Node, _: KubeProxy, chance: random.Random) -> None:
    """The agent stops, and starts after a while."""
    node.agent.stop()
    time.sleep(chance.uniform(0.0, 1.0))
    node.start()


def kill(node: Node, _: KubeProxy, chance: random.Random) -> None:
    """The agent is killed while it writes all rules anew, and another one starts."""
    node.agent.stop()
    masquerades = node.settings.get("iptables", {}).get("masqueradeAll", False)
    node.settings = merged(node.settings, {"iptables": {"masqueradeAll": not masquerades}})
    begun = time.time()
    node.launch()
    node.lab.until(lambda: bool(node.agent.restores(begun)), "the agent writes")
    time.sleep(chance.uniform(0.0, 0.3))
    node.agent.kill()
    node.start()


def roll_out(node: Node, _: KubeProxy, chance: random.Random) -> None:
    """A second agent starts and waits; the first stops, and the second takes over."""
    replaced = node.swap()
    node.launch()
    node.wait_for("waiting for another agent")
    time.sleep(chance.uniform(0.0, 0.5))
    replaced.stop()
    node.wait_for("rules in place")


def switch_dispatch(node: Node, _: KubeProxy, chance: random.Random) -> None:
    """The agent restarts with a tree instead of flat dispatch, or the other way round."""
    node.agent.stop()
    before = node.settings.get("pykubeproxy", {}).get("dispatch", "auto")
    node.settings = merged(
        node.settings, {"pykubeproxy": {"dispatch": "auto" if before == "flat" else "flat"}}
    )
    node.start()


def to_kube_proxy_and_back(node: Node, kube_proxy: KubeProxy, chance: random.Random) -> None:
    """The agent stops, kube-proxy takes over; kube-proxy stops, the agent takes over."""
    node.agent.stop()
    with kube_proxy.running(node) as syncs:
        time.sleep(chance.uniform(0.0, 1.0))
        syncs()
    node.start()


def beside_kube_proxy(node: Node, kube_proxy: KubeProxy, chance: random.Random) -> None:
    """kube-proxy starts, and both run for some seconds; then the agent stops, and starts again beside kube-proxy."""
    with kube_proxy.running(node) as syncs:
        syncs()
        node.agent.stop()
        time.sleep(chance.uniform(0.0, 1.0))
        node.start()
        syncs()


def change_backend(node: Node, _: KubeProxy, chance: random.Random) -> None:
    """The agent restarts with the other iptables backend and removes its rules from the one it used before."""
    before = node.backend
    node.agent.stop()
    node.backend = Backend.LEGACY if before is Backend.NFT else Backend.NFT
    time.sleep(chance.uniform(0.0, 0.5))
    node.start()
    node.lab.until(lambda: not node.has_rules(before), f"no rules are left in {before.value}")


def nothing(node: Node, _: KubeProxy, chance: random.Random) -> None:
    """Services and endpoints change, but no agent."""
    time.sleep(chance.uniform(0.5, 1.5))


ALL: tuple[HandOver, ...] = (
    restart,
    kill,
    roll_out,
    switch_dispatch,
    to_kube_proxy_and_back,
    beside_kube_proxy,
    change_backend,
)
