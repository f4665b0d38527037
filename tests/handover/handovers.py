"""The hand-overs between agents and kube-proxy, a stand-in or a real binary.

Each begins and ends with one running agent whose rules are in place.
"""

import json
import random
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import yaml

import pykubeproxy
from pykubeproxy.kernel import Backend, KernelError
from pykubeproxy.lab.agents import COMMAND
from pykubeproxy.lab.api import NODES, SERVICES, SLICES, Object
from pykubeproxy.lab.apiserver.patches import merged
from pykubeproxy.lab.machine import SYSTEM_PATH
from pykubeproxy.lab.network import CLUSTER_CIDRS
from pykubeproxy.objects import Family
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.kube_proxy import without_unknown
from tests.handover.node import NEXT_VERSION, NODE, Node

_KINDS = {
    SERVICES: {"apiVersion": "v1", "kind": "Service"},
    SLICES: {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"},
    NODES: {"apiVersion": "v1", "kind": "Node"},
}
_FAMILY = re.compile(r"^# (IPv[46]), .*\n", re.MULTILINE)
_NFACCT = re.compile(r" -m nfacct --nfacct-name +\S+")
_SYNC_SECONDS = 30.0
_METRICS = "127.0.0.1:20249"  # not the agent's
# More than the chains of all Services that change during a hand-over; IPv4 has 1200 chains of endpoints and Services.
_FEW_CHAINS = 300
_LAST_SYNC = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"


class KubeProxy(Protocol):
    """A kube-proxy that runs on a node within a context, which begins after its first sync.

    The context returns a function that lets it sync again.
    """

    def running(self, node: Node) -> AbstractContextManager[Callable[[], None]]: ...


class StandIn:
    """Writes the rules of all Services in kube-proxy's form, each table of a family in one transaction.

    `render --dispatch flat` gives that form; the recorded cases show that it is kube-proxy's.
    """

    @contextmanager
    def running(self, node: Node) -> Iterator[Callable[[], None]]:
        """See KubeProxy; the function waits for the end of the next sync."""
        _sync(node)
        ended, synced = threading.Event(), threading.Semaphore(0)

        def run() -> None:
            while not ended.is_set():
                _sync(node)
                synced.release()

        def wait() -> None:
            while synced.acquire(blocking=False):
                pass
            if not synced.acquire(timeout=_SYNC_SECONDS):
                raise TimeoutError("the stand-in for kube-proxy does not sync")

        with ThreadPoolExecutor(1) as other:
            running = other.submit(run)
            try:
                yield wait
            finally:
                ended.set()
            running.result()


def _sync(node: Node) -> None:
    for family, text in _rendered(node).items():
        _write(node, family, text)


def _rendered(node: Node) -> dict[Family, str]:
    items = [item | kind for path, kind in _KINDS.items() for item in node.lab.api.items(path)]
    options = (
        "--config",
        str(node.lab.logs / f"{NODE}.yaml"),
        "--hostname-override",
        NODE,
        "--dispatch",
        "flat",
    )
    done = subprocess.run(
        [*COMMAND, "render", "-f", "-", *options],
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}),
        capture_output=True,
        text=True,
        check=True,
    )
    _, *parts = _FAMILY.split(_NFACCT.sub("", done.stdout))
    return {Family(name): text for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _write(node: Node, family: Family, text: str) -> None:
    """Write the rules; existing jumps stay, chains of unknown Services are deleted."""
    tables = node.tables(family)
    while True:
        live = tables.save(["nat"]).chains
        written = _by_table(text, jumps=not live.get(ChainKey("nat", "PREROUTING")))
        written["nat"] = without_unknown(written["nat"], live)
        blocks = ["\n".join([f"*{table}", *lines, "COMMIT\n"]) for table, lines in written.items()]
        with suppress(KernelError):  # an agent has changed the tables meanwhile: read them again
            tables.restore("".join(blocks))
            return


def _by_table(text: str, *, jumps: bool) -> dict[str, list[str]]:
    """Return the lines of filter and nat, those that declare chains first; without `jumps`, none for built-in chains."""
    tables: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            lines = tables.setdefault(line[1:], [])
        elif line.startswith((":", "-A")) or (jumps and line.startswith("-I")):
            lines.append(line)
    return {
        table: sorted(tables[table], key=lambda line: not line.startswith(":")) for table in ("filter", "nat")
    }


class RealKubeProxy:
    """Runs a kube-proxy binary in iptables mode."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary

    @contextmanager
    def running(self, node: Node) -> Iterator[Callable[[], None]]:
        """See KubeProxy; the function waits for a moment."""
        folder = node.lab.logs / "kube-proxy"
        folder.mkdir(exist_ok=True)
        config = folder / "config"
        config.write_text(yaml.safe_dump(self._config(node)))
        begun = time.time()
        with (folder / "log").open("ab") as log:
            command = [str(self._binary), "--config", str(config)]
            process = node.namespace.spawn(command, output=log, environment=_environment(node, folder))
        try:
            node.lab.until(lambda: _has_synced(node, begun), f"kube-proxy has synced; see {folder}/log")
            yield lambda: time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()

    def _config(self, node: Node) -> Object:
        kubeconfig = str(node.lab.directory.path / "kubeconfig")
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": kubeconfig, "contentType": "application/json"},
            "hostnameOverride": NODE,
            "clusterCIDR": ",".join(CLUSTER_CIDRS),
            "conntrack": {"maxPerCore": 0, "min": 0},
            "healthzBindAddress": "127.0.0.1:20256",
            "metricsBindAddress": _METRICS,
            "iptables": {"minSyncPeriod": "200ms"},
        }


def _environment(node: Node, folder: Path) -> dict[str, str]:
    """Return an environment whose iptables commands are those of the node's backend."""
    commands = folder / node.backend.value
    if not commands.exists():
        commands.mkdir()
        for command in ("iptables", "ip6tables"):
            for action in ("", "-save", "-restore"):
                (commands / f"{command}{action}").symlink_to(
                    f"/usr/sbin/{command}-{node.backend.value}{action}"
                )
    return {**node.environment, "PATH": f"{commands}:{SYSTEM_PATH}"}


def _has_synced(node: Node, begun: float) -> bool:
    """Return whether kube-proxy has synced both families since a time."""
    try:
        with (
            node.namespace.entered(),
            urllib.request.urlopen(f"http://{_METRICS}/metrics", timeout=2) as page,
        ):
            metrics = page.read().decode()
    except OSError:
        return False
    times = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(_LAST_SYNC)]
    return len(times) == len(Family) and min(times) > begun


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


def update(node: Node, _: KubeProxy, chance: random.Random) -> None:
    """An agent of the next version takes over, and one of this version again; they write only what changes meanwhile."""
    for version in (NEXT_VERSION, pykubeproxy.__version__):
        node.agent.stop()
        time.sleep(chance.uniform(0.0, 0.5))
        node.change_version()
        node.start()
        node.wait_for(f"version={version}")
        written = node.chains_written()
        assert len(written) >= len(Family) and max(written[: len(Family)]) < _FEW_CHAINS, (version, written)


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
    update,
    switch_dispatch,
    to_kube_proxy_and_back,
    beside_kube_proxy,
    change_backend,
)
