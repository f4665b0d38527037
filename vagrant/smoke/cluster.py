"""Access to the cluster under test through kubectl and connections from this machine."""

import http.client
import json
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from vagrant.smoke.answers import Reply, Seen, parse
from vagrant.smoke.objects import HOST, NAMESPACE, PORT, Object, ingress, objects

# The node label that selects the proxy.
LABEL = "service-proxy"
_AGENTS = (
    "-n",
    "kube-system",
    "-l",
    "app.kubernetes.io/name=pykubeproxy,app.kubernetes.io/component=service-proxy",
)
_CONTROLLER = ("-n", "ingress-nginx")
_CONNECT_SECONDS = 3.0


class Failed(Exception):
    """A command or wait failed; `str()` gives the reason."""


class Run(Protocol):
    """Runs kubectl with standard input `text` and a timeout; returns its output or raises Failed."""

    def __call__(self, *arguments: str, text: str = "", seconds: float = 60.0) -> str: ...


class Load(NamedTuple):
    """Continuous requests; `stop` ends them and returns the result."""

    stop: Callable[[], Seen]


def kubectl(*options: str) -> Run:
    """Return a function that runs kubectl with these global options, such as --context."""

    def run(*arguments: str, text: str = "", seconds: float = 60.0) -> str:
        command = ["kubectl", *options, *arguments]
        try:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds)
        except FileNotFoundError:
            raise Failed("kubectl is not installed") from None
        except subprocess.TimeoutExpired:
            raise Failed(f"kubectl {' '.join(arguments)} took longer than {seconds:.0f} s") from None
        if done.returncode:
            raise Failed(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    return run


class Cluster:
    """Operations of the scenarios on a cluster. `options` are kubectl's, such as --kubeconfig."""

    def __init__(self, run: Run, options: tuple[str, ...] = (), seconds: float = 120.0) -> None:
        self._run, self._options, self.seconds = run, options, seconds

    # State

    def agents(self) -> dict[str, bool]:
        """Return the nodes with an agent, and whether it is ready."""
        return {pod["spec"]["nodeName"]: _ready(pod) for pod in self._items("pods", *_AGENTS) if _placed(pod)}

    def desired_and_ready(self) -> tuple[int, int]:
        """Return the numbers of desired and of ready agents."""
        status = self._get("daemonset", "pykubeproxy", "-n", "kube-system")["status"]
        return status["desiredNumberScheduled"], status["numberReady"]

    def image(self) -> str:
        """Return the image of the agents. Raise Failed if there are none."""
        for pod in self._items("pods", *_AGENTS):
            return str(pod["spec"]["containers"][0]["image"])
        raise Failed("no pods of pykubeproxy in kube-system; deploy it first")

    def has_kube_proxy(self) -> bool:
        """Return whether the cluster also has a DaemonSet kube-proxy."""
        return bool(
            self._run(
                "-n", "kube-system", "get", "daemonset", "kube-proxy", "--ignore-not-found", "-o", "name"
            )
        )

    def node_addresses(self) -> dict[str, str]:
        """Return the (last) internal address of each ready node."""
        return {
            node["metadata"]["name"]: address["address"]
            for node in self._items("nodes")
            if _ready(node)
            for address in node["status"]["addresses"]
            if address["type"] == "InternalIP"
        }

    def pods(self) -> set[str]:
        """Return the web server's pods that are ready and not terminating."""
        return {_name(it) for it in self._web_pods() if _ready(it)}

    # The workload

    def deploy(self, image: str) -> None:
        """Create the workload and wait until it is ready."""
        self._apply(objects(image))
        self.rolled_out()
        self._run(
            "-n",
            NAMESPACE,
            "wait",
            "--for=condition=Ready",
            "pod/client",
            self._timeout(),
            seconds=self.seconds + 10,
        )

    def remove(self) -> None:
        """Delete the namespace of the workload."""
        self._run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")

    def scale(self, replicas: int) -> set[str]:
        """Scale the web servers; return their names when exactly these are ready."""
        self._run("-n", NAMESPACE, "scale", "deployment/web", f"--replicas={replicas}")
        self.rolled_out()
        self.until(lambda: len(self.pods()) == replicas, f"{replicas} web servers")
        return self.pods()

    def restart(self) -> None:
        """Replace all web servers in a rolling update and wait until the old ones have ended."""
        old = {_name(it) for it in self._web_pods()}
        self._run("-n", NAMESPACE, "rollout", "restart", "deployment/web")
        self.rolled_out()
        self.until(lambda: old.isdisjoint(map(_name, self._web_pods())), "the old web servers to end")

    def rolled_out(self) -> None:
        """Wait until the web servers are rolled out."""
        self._run(
            "-n", NAMESPACE, "rollout", "status", "deployment/web", self._timeout(), seconds=self.seconds + 10
        )

    def client_node(self) -> str:
        """Return the client's node."""
        return str(self._get("pod", "client", "-n", NAMESPACE)["spec"]["nodeName"])

    def probe(self, count: int = 60) -> Seen:
        """Return the result of `count` requests of the client to the Service."""
        return parse(self._run(*_probe(count), seconds=self.seconds))

    def load(self) -> Load:
        """Start continuous requests of the client; return when the first has ended."""
        process = subprocess.Popen(
            ["kubectl", *self._options, *_probe(0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

        assert process.stdout
        if not select.select([process.stdout], [], [], self.seconds)[0]:
            process.kill()
            process.communicate()
            raise Failed(f"the probe made no request within {self.seconds:.0f} s")

        def stop() -> Seen:
            try:
                output, errors = process.communicate("\n", timeout=self.seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                raise Failed(f"the probe did not stop within {self.seconds:.0f} s") from None
            if process.returncode:
                raise Failed(f"the probe exited with status {process.returncode}: {errors.strip()}")
            return parse(output)

        return Load(stop)

    # Nodes and their proxies

    def label(self, node: str) -> str:
        """Return the value of the node's proxy label, or ""."""
        return str(self._get("node", node)["metadata"].get("labels", {}).get(LABEL, ""))

    def relabel(self, node: str, value: str) -> None:
        """Set the node's proxy label; "" removes it."""
        self._run("label", "node", node, f"{LABEL}={value}" if value else f"{LABEL}-", "--overwrite")

    # The ingress controller

    def has_ingress(self) -> bool:
        """Return whether ingress-nginx is installed."""
        found = self._run(
            *_CONTROLLER, "get", "service", "ingress-nginx-controller", "--ignore-not-found", "-o", "name"
        )
        return bool(found)

    def expose(self) -> int:
        """Create the Ingress of the web server; return the controller's node port."""
        self._apply([ingress()])
        ports = self._get("service", "ingress-nginx-controller", *_CONTROLLER)["spec"]["ports"]
        return next(int(port["nodePort"]) for port in ports if port["port"] == PORT)

    def policy(self) -> str:
        """Return the controller's externalTrafficPolicy."""
        return str(
            self._get("service", "ingress-nginx-controller", *_CONTROLLER)["spec"]["externalTrafficPolicy"]
        )

    def set_policy(self, policy: str) -> None:
        """Set the controller's externalTrafficPolicy."""
        patch = json.dumps({"spec": {"externalTrafficPolicy": policy}})
        self._run(*_CONTROLLER, "patch", "service", "ingress-nginx-controller", "--type=merge", "-p", patch)

    def ingress_nodes(self) -> set[str]:
        """Return the controller's nodes."""
        pods = self._items("pods", *_CONTROLLER, "-l", "app.kubernetes.io/component=controller")
        return {it["spec"]["nodeName"] for it in pods if _ready(it)}

    def ask(self, address: str, port: int) -> Reply | None:
        """Send a request from this machine to a node port; return None if there is no response."""
        connection = http.client.HTTPConnection(address, port, timeout=_CONNECT_SECONDS)
        with suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            connection.request("GET", "/", headers={"Host": HOST})
            answer = connection.getresponse()
            body = answer.read()
            if answer.status == 200:
                return Reply(str(json.loads(body)["forwarded_for"]))
        connection.close()
        return None

    def own_address(self, address: str) -> str:
        """Return the source address of this machine for connections to `address`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, PORT))
            return str(probe.getsockname()[0])

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until the condition holds. Raise Failed after the timeout."""
        deadline = time.monotonic() + self.seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Failed(f"timed out after {self.seconds:.0f} s waiting for {what}")
            time.sleep(0.5)

    def _web_pods(self) -> list[dict[str, Any]]:
        return self._items("pods", "-n", NAMESPACE, "-l", "app=web")

    def _get(self, kind: str, name: str, *options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._run("get", kind, name, *options, "-o", "json"))
        return found

    def _items(self, kind: str, *options: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self._run("get", kind, *options, "-o", "json"))["items"]
        return listed

    def _apply(self, items: Iterable[Object]) -> None:
        document = {"apiVersion": "v1", "kind": "List", "items": list(items)}
        self._run("apply", "-f", "-", text=json.dumps(document))

    def _timeout(self) -> str:
        return f"--timeout={self.seconds:.0f}s"


def _probe(count: int) -> tuple[str, ...]:
    return (
        "-n",
        NAMESPACE,
        "exec",
        "-i",
        "client",
        "--",
        "python3",
        "/programs/probe.py",
        "web",
        str(PORT),
        str(count),
    )


def _name(it: dict[str, Any]) -> str:
    return str(it["metadata"]["name"])


def _placed(pod: dict[str, Any]) -> bool:
    return "nodeName" in pod["spec"]


def _ready(it: dict[str, Any]) -> bool:
    """Return whether a pod or node is ready and not terminating."""
    conditions = it.get("status", {}).get("conditions", [])
    ready = any(of["type"] == "Ready" and of["status"] == "True" for of in conditions)
    return ready and "deletionTimestamp" not in it["metadata"]
