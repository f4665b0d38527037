"""A cluster as the smoke test uses it, by way of kubectl and of connections from this machine."""

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from vagrant.smoke.answers import Reply, Seen, parse
from vagrant.smoke.objects import HOST, NAMESPACE, PORT, Object, ingress, objects

# The label that says which proxy a node has.
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
    """The cluster did not do as told; `str()` says what."""


class Run(Protocol):
    """How kubectl is run: arguments, standard input, and the seconds it may take; returns its output or raises Failed."""

    def __call__(self, *arguments: str, text: str = "", seconds: float = 60.0) -> str: ...


class Load(NamedTuple):
    """Requests that go on until `stop`, which tells what was seen."""

    stop: Callable[[], Seen]


def kubectl(*options: str) -> Run:
    """Runs kubectl with these options before all others, such as --context."""

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
    """What the scenarios need of a cluster. `options` are kubectl's, such as --kubeconfig."""

    def __init__(self, run: Run, options: tuple[str, ...] = (), seconds: float = 120.0) -> None:
        self._run, self._options, self.seconds = run, options, seconds

    # What is there

    def agents(self) -> dict[str, bool]:
        """The nodes with an agent, and whether it is ready."""
        return {pod["spec"]["nodeName"]: _ready(pod) for pod in self._items("pods", *_AGENTS) if _placed(pod)}

    def wanted_and_ready(self) -> tuple[int, int]:
        """On how many nodes an agent is to be, and on how many one is ready."""
        status = self._get("daemonset", "pykubeproxy", "-n", "kube-system")["status"]
        return status["desiredNumberScheduled"], status["numberReady"]

    def image(self) -> str:
        """The image of the agents. Raises Failed if there are none."""
        for pod in self._items("pods", *_AGENTS):
            return str(pod["spec"]["containers"][0]["image"])
        raise Failed("there are no pods of pykubeproxy in kube-system")

    def has_kube_proxy(self) -> bool:
        """Whether the cluster has a DaemonSet kube-proxy too."""
        return bool(
            self._run(
                "-n", "kube-system", "get", "daemonset", "kube-proxy", "--ignore-not-found", "-o", "name"
            )
        )

    def node_addresses(self) -> dict[str, str]:
        """The internal address of each node that is ready; of several the last."""
        return {
            node["metadata"]["name"]: address["address"]
            for node in self._items("nodes")
            if _ready(node)
            for address in node["status"]["addresses"]
            if address["type"] == "InternalIP"
        }

    def pods(self) -> set[str]:
        """The web server's pods that are ready and stay."""
        return {
            it["metadata"]["name"]
            for it in self._items("pods", "-n", NAMESPACE, "-l", "app=web")
            if _ready(it)
        }

    # The workload

    def deploy(self, image: str) -> None:
        """Put the workload in place, and wait for it."""
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
        """Take everything away again."""
        self._run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")

    def scale(self, replicas: int) -> set[str]:
        """Have so many web servers; returns their names when they are ready and the others gone."""
        self._run("-n", NAMESPACE, "scale", "deployment/web", f"--replicas={replicas}")
        self.rolled_out()
        self.until(lambda: len(self.pods()) == replicas, f"{replicas} web servers")
        return self.pods()

    def restart(self) -> None:
        """Replace all web servers, one by one, and wait for it."""
        self._run("-n", NAMESPACE, "rollout", "restart", "deployment/web")
        self.rolled_out()

    def rolled_out(self) -> None:
        """Wait until the web servers are as wanted."""
        self._run(
            "-n", NAMESPACE, "rollout", "status", "deployment/web", self._timeout(), seconds=self.seconds + 10
        )

    def client_node(self) -> str:
        """Where the client runs."""
        return str(self._get("pod", "client", "-n", NAMESPACE)["spec"]["nodeName"])

    def probe(self, count: int = 60) -> Seen:
        """What the client sees of so many requests to the Service."""
        return parse(self._run(*_probe(count), seconds=self.seconds))

    def load(self) -> Load:
        """Requests of the client that go on until they are told to stop."""
        process = subprocess.Popen(
            ["kubectl", *self._options, *_probe(0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

        def stop() -> Seen:
            output, errors = process.communicate("\n", timeout=self.seconds)
            if process.returncode:
                raise Failed(f"the probe ended with {process.returncode}: {errors.strip()}")
            return parse(output)

        return Load(stop)

    # Nodes and their proxies

    def label(self, node: str) -> str:
        """Which proxy its label says, "" if none."""
        return str(self._get("node", node)["metadata"].get("labels", {}).get(LABEL, ""))

    def relabel(self, node: str, value: str) -> None:
        """Say which proxy it is to have; "" takes the label off."""
        self._run("label", "node", node, f"{LABEL}={value}" if value else f"{LABEL}-", "--overwrite")

    # The ingress controller

    def has_ingress(self) -> bool:
        """Whether ingress-nginx is there."""
        found = self._run(
            *_CONTROLLER, "get", "service", "ingress-nginx-controller", "--ignore-not-found", "-o", "name"
        )
        return bool(found)

    def expose(self) -> int:
        """Let the ingress controller lead to the web server; returns its node port."""
        self._apply([ingress()])
        ports = self._get("service", "ingress-nginx-controller", *_CONTROLLER)["spec"]["ports"]
        return next(int(port["nodePort"]) for port in ports if port["port"] == PORT)

    def policy(self) -> str:
        """The controller's externalTrafficPolicy."""
        return str(
            self._get("service", "ingress-nginx-controller", *_CONTROLLER)["spec"]["externalTrafficPolicy"]
        )

    def set_policy(self, policy: str) -> None:
        """Give the controller's Service that externalTrafficPolicy."""
        patch = json.dumps({"spec": {"externalTrafficPolicy": policy}})
        self._run(*_CONTROLLER, "patch", "service", "ingress-nginx-controller", "--type=merge", "-p", patch)

    def ingress_nodes(self) -> set[str]:
        """Where the controller runs."""
        pods = self._items("pods", *_CONTROLLER, "-l", "app.kubernetes.io/component=controller")
        return {it["spec"]["nodeName"] for it in pods if _ready(it)}

    def ask(self, address: str, port: int) -> Reply | None:
        """One request from this machine to a node port, None if nobody answers."""
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
        """The address from which this machine talks to that one."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address, PORT))
            return str(asking.getsockname()[0])

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for it. Raises Failed when it takes too long."""
        deadline = time.monotonic() + self.seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Failed(f"waited {self.seconds:.0f} s in vain for {what}")
            time.sleep(0.5)

    def _get(self, kind: str, name: str, *options: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._run("get", kind, name, *options, "-o", "json"))
        return found

    def _items(self, kind: str, *options: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self._run("get", kind, *options, "-o", "json"))["items"]
        return listed

    def _apply(self, wanted: Iterable[Object]) -> None:
        document = {"apiVersion": "v1", "kind": "List", "items": list(wanted)}
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


def _placed(pod: dict[str, Any]) -> bool:
    return "nodeName" in pod["spec"]


def _ready(it: dict[str, Any]) -> bool:
    """Whether a pod or node is ready, and is to stay."""
    conditions = it.get("status", {}).get("conditions", [])
    ready = any(of["type"] == "Ready" and of["status"] == "True" for of in conditions)
    return ready and "deletionTimestamp" not in it["metadata"]
