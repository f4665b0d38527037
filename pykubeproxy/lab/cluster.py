"""A cluster without a cluster: the network, the API server, the agents, and pods that come and go."""

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType

from pykubeproxy.lab import bodies, network, sweep
from pykubeproxy.lab.agents import Agent
from pykubeproxy.lab.api import NODES, SERVICES, Api, Object, in_namespace
from pykubeproxy.lab.endpoints import SliceController
from pykubeproxy.lab.places import Place, Service
from pykubeproxy.lab.pods import Identity, Pod, server_command
from pykubeproxy.lab.requirements import require
from pykubeproxy.lab.rundir import RunDirectory

API_PORT = 6443
PATIENCE = 15.0


class Lab:
    """A lab for as long as the context lasts; whatever happens to this process, nothing stays behind.

    `backend` is passed to the agents (auto, nft or legacy), `settings` are fields of their configuration.
    With `agents` False none is started. Raises Unmet where no lab can be built, AlreadyRunning for a name
    that is taken.
    """

    def __init__(
        self,
        name: str = "lab",
        *,
        backend: str = "auto",
        settings: Object | None = None,
        agents: bool = True,
    ) -> None:
        self.name = name
        self.backend = backend
        self.patience = PATIENCE
        self.directory = RunDirectory(name)
        self.pods: dict[str, Pod] = {}
        self._settings: Object = {
            # A lab is watched by somebody: follow changes faster than kube-proxy's usual second.
            "iptables": {"minSyncPeriod": "200ms"},
            "pykubeproxy": {"iptablesBackend": backend},
            **(settings or {}),
        }
        self._start_agents = agents
        self._ended: list[Pod] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pod_numbers: dict[str, itertools.count[int]] = {}
        self._address_numbers = {site.name: itertools.cycle(range(2, 255)) for site in network.SITES}

    # --- coming and going

    def __enter__(self) -> "Lab":
        require()
        with ExitStack() as stack:
            self.directory.lock(patience=2.0)  # for the janitor of a lab that just ended
            stack.callback(self.directory.release)
            sweep.sweep_namespaces(self.name)
            self.directory.clear()
            self._janitor = sweep.start_janitor(self.name)
            stack.callback(self._sweep)
            self._build(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _build(self, stack: ExitStack) -> None:
        self.network = network.Network(self.name)
        stack.callback(self.network.close)
        self.client = Place(self.network.client, network.CLIENT)
        self.nodes = {
            site.name: Place(self.network.nodes[site.name], site.addresses) for site in network.SITES
        }
        self.logs = self.directory.path / "logs"
        self.logs.mkdir()
        self.api = self._start_api()
        for site in network.SITES:
            self.api.put(NODES, site.name, bodies.node(site))
        self._controller = SliceController(self.api, lambda: list(self.pods.values()))
        stack.callback(self._controller.stop)
        threading.Thread(target=self._controller.follow, name="slices", daemon=True).start()
        kubeconfig = self.directory.path / "kubeconfig"
        kubeconfig.write_text(bodies.kubeconfig(self.api.url))
        self.agents = {
            name: Agent(node, self.logs, kubeconfig, self._settings)
            for name, node in self.network.nodes.items()
        }
        if self._start_agents:
            for agent in self.agents.values():
                agent.start()
        self._write_state()

    def _start_api(self) -> Api:
        out = self.logs / "apiserver.out"
        command = [sys.executable, "-m", "pykubeproxy.lab.apiserver"]
        command += ["--listen", f"{network.FABRIC[0]}:{API_PORT}"]
        with out.open("wb") as output, (self.logs / "apiserver.log").open("wb") as errors:
            process = self.network.fabric.spawn(command, output=output, errors=errors)
        self._processes.append(process)
        deadline = time.monotonic() + PATIENCE
        while not out.read_bytes().endswith(b"\n"):
            if process.poll() is not None or time.monotonic() > deadline:
                reason = (self.logs / "apiserver.log").read_text().strip()
                raise RuntimeError(f"the lab's API server did not start: {reason}")
            time.sleep(0.01)
        return Api(self.network.fabric.name, network.FABRIC[0], API_PORT)

    def _sweep(self) -> None:
        """Have the janitor do its work: it waits for our end of the pipe and for the lock."""
        self.directory.release()
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait()
        for pod in (*self.pods.values(), *self._ended):
            pod.wait_gone()
            pod.namespace.close()
        for process in self._processes:
            process.wait()
        for agent in getattr(self, "agents", {}).values():
            agent.reap()

    # --- pods

    def deploy(
        self,
        app: str,
        replicas: int,
        *,
        nodes: Sequence[str] = ("node1", "node2"),
        gates: Sequence[str] = (),
        linger: float = 0.0,
    ) -> list[Pod]:
        """Start that many pods of an app, on the nodes in turn, and wait until their containers answer.

        `gates` are readiness gates, closed at first; `linger` is for how many seconds a pod serves on
        after it was told to end.
        """
        pods = [
            self._start_pod(app, node, frozenset(gates), linger)
            for node in itertools.islice(itertools.cycle(nodes), replicas)
        ]
        for pod in pods:
            pod.wait_answering()
        return pods

    def _start_pod(self, app: str, node: str, gates: frozenset[str], linger: float) -> Pod:
        name = f"{app}-{next(self._pod_numbers.setdefault(app, itertools.count(1)))}"
        return self.start_pod(name, app, node, server_command(name, linger), gates)

    def start_pod(
        self,
        name: str,
        app: str,
        node: str,
        command: list[str],
        gates: frozenset[str] = frozenset(),
    ) -> Pod:
        """Start one pod with a program of its own, which says "ready" on its standard output."""
        site = next(site for site in network.SITES if site.name == node)
        addresses = site.pod_addresses(next(self._address_numbers[node]))
        identity = Identity(name, app, node, site.zone, addresses)
        namespace, interface = self.network.add_pod(name, node, addresses)
        pod = Pod(
            identity,
            namespace,
            interface,
            command=command,
            log=self.logs / f"{name}.log",
            gates=gates,
            changed=self._changed,
        )
        self.pods[name] = pod
        self._changed()
        return pod

    def stop_pod(self, pod: Pod, *, drained: Callable[[], None] = lambda: None) -> None:
        """Delete a pod as a cluster does: terminating first, then SIGTERM, gone when its process ended.

        `drained` may hold the SIGTERM back, as a preStop hook does.
        """
        pod.mark_terminating()
        drained()
        pod.terminate()
        self.remove_pod(pod)

    def remove_pod(self, pod: Pod) -> None:
        """Wait for the end of a pod's process.

        Its network stays until `reset`, so that who still connects to it is refused, not left to wait.
        """
        pod.wait_gone()
        self._ended.append(self.pods.pop(pod.name))
        self._changed()

    def _changed(self) -> None:
        if not self._controller.stopped:
            self._controller.reconcile()
            self._write_state()

    # --- services

    def service(
        self, name: str, *, port: int = 80, protocols: Sequence[str] = ("TCP",), **spec: object
    ) -> Service:
        """Create a dual-stack Service for the app of this name; `spec` are further fields of its spec."""
        body = bodies.service(name, port, protocols, spec)
        made = self.api.call("POST", in_namespace(SERVICES, "default"), body)["spec"]
        self._changed()
        return Service(name, tuple(made["clusterIPs"]), port, int(made["ports"][0].get("nodePort", 0)))

    def change_service(self, name: str, **spec: object) -> None:
        """Change fields of a Service's spec (a merge patch)."""
        self.api.call("PATCH", f"{in_namespace(SERVICES, 'default')}/{name}", {"spec": spec})
        self._changed()

    def reset(self) -> None:
        """Back to an empty cluster: no Services, no pods; the agents run on."""
        for service in self.api.items(in_namespace(SERVICES, "default")):
            self.api.delete(f"{in_namespace(SERVICES, 'default')}/{service['metadata']['name']}")
        for pod in list(self.pods.values()):
            pod.kill()
            self.remove_pod(pod)
        for pod in self._ended:
            self.network.remove_pod(pod.namespace, pod.identity.node, pod.interface)
        self._ended.clear()
        self._pod_numbers.clear()
        self._changed()
        self.check()

    # --- waiting and telling

    def check(self) -> None:
        """Raise AgentEnded if an agent ended by itself."""
        for agent in self.agents.values():
            agent.check()

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait until the condition holds; returns after how many seconds.

        Raises TimeoutError after `patience` seconds, AgentEnded when an agent ended meanwhile.
        """
        started = time.monotonic()
        while not condition():
            self.check()
            if time.monotonic() - started > self.patience:
                raise TimeoutError(f"after {self.patience:.0f} s still not: {what}")
            time.sleep(0.02)
        return time.monotonic() - started

    def _write_state(self) -> None:
        self.directory.write_state(
            {
                "name": self.name,
                "driver": os.getpid(),
                "api": self.api.url,
                "backend": self.backend,
                "nodes": {
                    name: {"addresses": node.addresses, "agent": self.agents[name].pid}
                    for name, node in self.nodes.items()
                },
                "client": {"addresses": self.client.addresses},
                "pods": {
                    pod.name: {
                        "node": pod.identity.node,
                        "addresses": pod.identity.addresses,
                        "state": pod.status.describe(),
                    }
                    for pod in list(self.pods.values())
                },
            }
        )
