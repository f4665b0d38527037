"""A simulated cluster for the smoke test, with faults."""

from collections.abc import Callable, Collection
from itertools import count

from vagrant.smoke.answers import Reply, Seen
from vagrant.smoke.cluster import Failed, Load

NODES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
OURS = "192.0.2.1"


class Simulated:
    """Three nodes, the client on n1, the ingress controller on n2. `faults` are names of simulated faults."""

    def __init__(self, *faults: str) -> None:
        self.faults = set(faults)
        self.labels = dict.fromkeys(NODES, "")
        self.traffic_policy = "Local"
        self.exposed = False
        self.restarts = 0
        self._names = map("web-{}".format, count())
        self._pods: list[str] = []
        self._programmed: list[str] = []

    def agents(self) -> dict[str, bool]:
        return {node: True for node, label in self.labels.items() if label != "kube-proxy"}

    def desired_and_ready(self) -> tuple[int, int]:
        return (0, 0) if "none" in self.faults else (3, 2 if "late" in self.faults else 3)

    def has_kube_proxy(self) -> bool:
        return "kube-proxy" in self.faults

    def node_addresses(self) -> dict[str, str]:
        return NODES

    def own_address(self, _: str) -> str:
        return OURS

    def client_node(self) -> str:
        return "n1"

    def label(self, node: str) -> str:
        return self.labels[node]

    def relabel(self, node: str, value: str) -> None:
        if value == "" and "stays away" in self.faults:
            return
        self.labels[node] = value

    def scale(self, replicas: int) -> set[str]:
        self._pods = [*self._pods[:replicas], *(next(self._names) for _ in range(replicas - len(self._pods)))]
        self._sync()
        return set(self._pods)

    def restart(self) -> None:
        self.restarts += 1
        self._pods = [next(self._names) for _ in self._pods]
        self._sync()

    def probe(self, requests: int = 60) -> Seen:
        self._sync()
        return seen(self._programmed, requests, gone=set(self._programmed) - set(self._pods))

    def load(self) -> Load:
        before = list(self._pods)

        def stop() -> Seen:
            pods = before if "never updated" in self.faults else [*before, *self._pods]
            if "idle" in self.faults:
                return Seen(3, dict.fromkeys(pods, 1))
            if "quick" in self.faults:
                return Seen(88, dict.fromkeys(pods, 8))
            failed = 1 if "one is lost" in self.faults else 0
            return Seen(500, dict.fromkeys(pods, 80), failed, ("ConnectionRefusedError",) * failed)

        return Load(stop)

    def has_ingress(self) -> bool:
        return "no ingress" not in self.faults

    def expose(self) -> int:
        self.exposed = True
        return 30080

    def policy(self) -> str:
        return self.traffic_policy

    def set_policy(self, policy: str) -> None:
        self.traffic_policy = policy

    def ingress_nodes(self) -> set[str]:
        return {"n2"}

    def ask(self, address: str, port: int) -> Reply | None:
        assert (self.exposed, port) == (True, 30080)
        node = next(name for name, it in NODES.items() if it == address)
        if self.traffic_policy == "Cluster":
            if node == "n3" and "n3 is silent" in self.faults:
                return None
            return Reply(OURS if "let through" in self.faults else "10.244.1.1")
        if node not in self.ingress_nodes():
            return Reply(OURS) if "all answer" in self.faults else None
        if "n2 is silent" in self.faults:
            return None
        return Reply("10.244.1.1" if "hidden" in self.faults else OURS)

    def until(self, condition: Callable[[], object], what: str) -> None:
        for _ in range(3):
            if condition():
                return
        raise Failed(f"timed out waiting for {what}")

    def _sync(self) -> None:
        """Update the pods that the rules of the client's node use."""
        if "stuck" in self.faults and self._programmed:
            return
        if "n1" in self.agents() or "rules follow by themselves" in self.faults:
            self._programmed = list(self._pods)
        elif "rules go with the agent" in self.faults:
            self._programmed = []


def seen(pods: Collection[str], requests: int, gone: Collection[str]) -> Seen:
    """Return the result of requests spread evenly over pods, some of which are gone."""
    if not pods:
        return Seen(requests, {}, requests, ("ConnectionRefusedError",))
    each = requests // len(pods)
    failed = each * len(gone)
    return Seen(requests, {it: each for it in pods if it not in gone}, failed, ("timeout",) * bool(failed))
