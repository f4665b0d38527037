"""A cluster on one machine: the network, the API server, the agents, and pods."""

import itertools
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pykubeproxy.lab import agents, api, machine, network
from pykubeproxy.lab.agents import KubeProxyBinary, ProxyProcess
from pykubeproxy.lab.api import NAMESPACES, NODES, PODS, SERVICES, Api, Object, in_namespace
from pykubeproxy.lab.apiserver import server
from pykubeproxy.lab.apiserver.store import now
from pykubeproxy.lab.network import SITES, Namespace
from pykubeproxy.lab.pods import (
    LabPod,
    PodState,
    PublishedObject,
    Publisher,
    proxy_pod,
    slices,
    workload,
    workload_pod,
)
from pykubeproxy.lab.prober import Prober, ProbeTarget

API_PORT = 6443
TIMEOUT = 120.0
_SERVICES, _PODS = in_namespace(SERVICES, "default"), in_namespace(PODS, "default")


@dataclass(frozen=True)
class LabService:
    """A Service as the API server created it."""

    name: str
    cluster_ips: tuple[str, ...]
    port: int
    node_port: int

    def vip(self, family: int = 4) -> ProbeTarget:
        return next(ProbeTarget(ip, self.port) for ip in self.cluster_ips if (":" in ip) == (family == 6))


@dataclass(frozen=True)
class LabHost:
    """A node or the outside client."""

    namespace: Namespace
    addresses: tuple[str, str]

    @property
    def prober(self) -> Prober:
        return Prober(self.namespace)

    def node_port(self, service: LabService, family: int = 4) -> ProbeTarget:
        """Return a Service's node port at this host's address."""
        return ProbeTarget(self.addresses[family == 6], service.node_port)


class Lab:
    """A lab that exists within the context; nothing remains after it, even if this process is killed.

    `backend` is the agents' iptables backend (auto, nft or legacy), `settings` are fields of their configuration.
    Without `agents`, the caller starts them. With `kube_proxy`, it runs in place of the agents. `api_server` is the module
    to run as the API server. Raises LabError if this machine cannot run a lab, LabExists if the name is in use.
    """

    def __init__(
        self,
        name: str = "lab",
        *,
        backend: str = "auto",
        settings: Object | None = None,
        agents: bool = True,
        kube_proxy: KubeProxyBinary | None = None,
        api_server: str = "pykubeproxy.lab.apiserver",
    ) -> None:
        self.name = name
        self.backend = backend
        self.timeout = TIMEOUT
        self.directory = machine.RunDirectory(name)
        self.logs = self.directory.logs
        self.pods: dict[str, LabPod] = {}
        self.agents: dict[str, ProxyProcess] = {}
        self.changing = (
            threading.Lock()
        )  # hold it to stop or start pods and agents while clients may delete some
        self._settings: Object = {
            "iptables": {"minSyncPeriod": "200ms"},  # scenarios wait for syncs: be faster than the usual 1 s
            **(
                {"nftables": {"minSyncPeriod": "200ms"}}
                if kube_proxy
                else {"pykubeproxy": {"iptablesBackend": backend}}
            ),
            **(settings or {}),
        }
        self.kube_proxy = kube_proxy
        self._start_agents = agents
        self._api_server = api_server
        self._started = now()
        self._ended: list[LabPod] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pod_numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._address_numbers = {name: itertools.cycle(range(2, 255)) for name in SITES}

    def __enter__(self) -> "Lab":
        machine.check_requirements()
        with ExitStack() as stack:
            self.directory.lock(timeout=2.0)  # the janitor of the last lab may still hold it
            stack.callback(self.directory.release)
            machine.remove_namespaces(self.name)
            self.directory.clear()
            self._janitor = machine.start_janitor(self.name)
            stack.callback(self._clean_up)
            self._build(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _build(self, stack: ExitStack) -> None:
        self.network = network.Network(self.name)
        stack.callback(self.network.close)
        self.outside = LabHost(self.network.outside, network.OUTSIDE)
        self.nodes = {name: LabHost(self.network.nodes[name], site.addresses) for name, site in SITES.items()}
        self.logs.mkdir()
        self.api = self._start_api()
        for name in ("default", "kube-system"):
            self.api.put(NAMESPACES, name, api.namespace(name))
        for name, site in SITES.items():
            self.api.put(NODES, name, api.node(site))
        self.directory.kubeconfig.write_text(server.kubeconfig(self.api.url))
        for name, node in self.network.nodes.items():
            self.agents[name] = self._proxy(node)
            if self._start_agents:
                self.agents[name].start()
        self._publisher = Publisher(self.api, self._published, self._deleted)
        stack.callback(self._publisher.stop)
        self._publisher.publish()
        self._write_state()

    def _proxy(self, node: Namespace) -> ProxyProcess:
        if self.kube_proxy:
            kubeconfig = self.directory.kubeconfig
            return agents.kube_proxy(
                node, self.logs, kubeconfig, self._settings, self.kube_proxy, self.backend
            )
        return agents.agent(node, self.logs, self.api.url, self._settings)

    def _published(self) -> Iterator[PublishedObject]:
        pods = list(self.pods.values())
        yield from map(workload_pod, pods)
        for name, agent in self.agents.items():
            yield proxy_pod(SITES[name], self._started, agent.alive, self.kube_proxy)
        objects = (pod["metadata"] for pod in self.api.items(_PODS))
        labels = {meta["name"]: meta.get("labels") or {} for meta in objects}
        for service in self.api.items(SERVICES):
            yield from map(PublishedObject, slices(service, pods, labels))

    def _deleted(self, pod: PublishedObject) -> None:
        """End a pod that a client has deleted; if it is that of a proxy, start the proxy again, as a DaemonSet does."""
        with self.changing:
            if pod.is_proxy:
                agent = self.agents[pod.node]
                if agent.alive:
                    agent.stop()
                agent.start()
                self.publish()
            elif pod.name in self.pods:
                self.stop_pod(self.pods[pod.name])

    def _start_api(self) -> Api:
        address, log = network.FABRIC[0], self.logs / "apiserver.log"
        command = [
            sys.executable,
            "-m",
            self._api_server,
            "--listen",
            f"{address}:{API_PORT}",
            "--lab",
            self.name,
        ]
        with log.open("wb") as errors:
            process = self.network.fabric.spawn(command, output=subprocess.PIPE, errors=errors)
        self._processes.append(process)
        assert process.stdout is not None
        with process.stdout as output:
            if not output.readline():
                raise RuntimeError(f"the lab's API server did not start: {log.read_text().strip()}")
        return Api(self.network.fabric.name, address, API_PORT)

    def _clean_up(self) -> None:
        """Let the janitor clean up: it waits for its pipe to close and for the lock."""
        self.directory.release()
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait()
        for pod in (*self.pods.values(), *self._ended):
            pod.wait_ended()
            pod.namespace.close()
        for process in self._processes:
            process.wait()
        for agent in self.agents.values():
            agent.reap()

    def deploy(
        self,
        app: str,
        replicas: int,
        *,
        nodes: Sequence[str] = tuple(SITES),
        gates: Sequence[str] = (),
        linger: float = 0.0,
    ) -> list[LabPod]:
        """Start pods with closed readiness gates on the nodes in turn; each serves `linger` seconds after SIGTERM."""
        pods = []
        for node in itertools.islice(itertools.cycle(nodes), replicas):
            name = f"{app}-{next(self._pod_numbers[app])}"
            command = workload(name, "--linger", str(linger))
            pods.append(self.start_pod(name, app, node, command, frozenset(gates)))
        for pod in pods:
            pod.wait_answering()
        return pods

    def start_pod(
        self, name: str, app: str, node: str, command: list[str], gates: frozenset[str] = frozenset()
    ) -> LabPod:
        """Start a pod with its own program, which writes "ready" to its standard output."""
        site = SITES[node]
        addresses = site.pod_addresses(next(self._address_numbers[node]))
        namespace, interface = self.network.add_pod(name, node, addresses)
        log, status = self.logs / f"{name}.log", PodState(gates=gates)
        pod = LabPod(name, app, site, addresses, namespace, interface, log, self.publish, status)
        pod.start(command)
        self.pods[name] = pod
        self.publish()
        return pod

    def stop_pod(self, pod: LabPod) -> None:
        """Delete a pod: mark it terminating, send SIGTERM, wait for the end of its process."""
        if pod.status.terminating:
            return  # somebody else deletes it
        pod.mark_terminating()
        pod.terminate()
        self.remove_pod(pod)

    def remove_pod(self, pod: LabPod) -> None:
        """Wait for a pod's process to end; its network stays until `reset`, so that connections are refused."""
        pod.wait_ended()
        if self.pods.pop(pod.name, None):  # nobody else has removed it
            self._ended.append(pod)
        self.publish()

    def publish(self) -> None:
        """Write pods and EndpointSlices that have changed, and the state for other commands."""
        if self._publisher.publish():
            self._write_state()

    def service(self, name: str, *, protocols: Sequence[str] = ("TCP",), **spec: object) -> LabService:
        """Create a dual-stack Service on port 80 for the app of this name; `spec` overrides fields of its spec."""
        created = self.api.call("POST", _SERVICES, api.service(name, 80, protocols, spec))["spec"]
        self.publish()
        port = created["ports"][0]
        return LabService(name, tuple(created["clusterIPs"]), port["port"], int(port.get("nodePort", 0)))

    def change_service(self, name: str, **spec: object) -> None:
        """Change fields of a Service's spec with a merge patch."""
        self.api.call("PATCH", f"{_SERVICES}/{name}", {"spec": spec})
        self.publish()

    def reset(self) -> None:
        """Delete all Services and pods; the agents keep running."""
        for service in self.api.items(_SERVICES):
            self.api.delete(f"{_SERVICES}/{service['metadata']['name']}")
        for pod in list(self.pods.values()):
            pod.kill()
            self.remove_pod(pod)
        for pod in self._ended:
            self.network.remove_pod(pod.namespace, pod.site.name, pod.interface)
        self._ended.clear()
        self._pod_numbers.clear()
        self.publish()
        self.check()

    def check(self) -> None:
        """Raise AgentEnded if a proxy ended unexpectedly."""
        for agent in self.agents.values():
            agent.check()

    def until(self, condition: Callable[[], bool], description: str) -> float:
        """Wait until the condition holds; return the seconds it took.

        Raises TimeoutError after `timeout` seconds, AgentEnded if a proxy ends meanwhile.
        """
        started = time.monotonic()
        while not condition():
            self.check()
            if time.monotonic() - started > self.timeout:
                raise TimeoutError(f"not within {self.timeout:.0f} s: {description}")
            time.sleep(0.02)
        return time.monotonic() - started

    def _write_state(self) -> None:
        hosts: list[Object] = [{"name": "fabric", "kind": "fabric", "addresses": network.FABRIC}]
        for name, node in self.nodes.items():
            agent = self.agents[name]
            proxy = {"agent": agent.pid, "proxy": agent.title}
            hosts.append({"name": name, "kind": "node", "addresses": node.addresses, **proxy})
        hosts.append({"name": "outside", "kind": "outside", "addresses": network.OUTSIDE})
        for pod in list(self.pods.values()):
            state = {"kind": "pod", "node": pod.site.name, "state": str(pod.status)}
            hosts.append({"name": pod.name, "addresses": pod.addresses, **state})
        self.directory.write_state(
            {
                "lab": self.name,
                "driver": os.getpid(),
                "logs": str(self.logs),
                "api": self.api.url,
                "hosts": hosts,
            }
        )
