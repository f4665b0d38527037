"""The smoke test passes on a working cluster and detects each simulated fault."""

from collections.abc import Callable, Collection
from itertools import count

import pytest

from vagrant.smoke.__main__ import run
from vagrant.smoke.answers import Reply, Seen
from vagrant.smoke.cluster import Failed, Load
from vagrant.smoke.scenarios import SCENARIOS

NODES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
OURS = "192.0.2.1"


class Simulated:
    """Three nodes, the client on n1, the ingress controller on n2. `faults` are names of simulated faults."""

    def __init__(self, *faults: str) -> None:
        self.faults = set(faults)
        self.labels = dict.fromkeys(NODES, "")
        self.traffic_policy = "Local"
        self.exposed = False
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
        node = next(name for name, item in NODES.items() if item == address)
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
    return Seen(
        requests, {item: each for item in pods if item not in gone}, failed, ("timeout",) * bool(failed)
    )


BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
NAMES = tuple(BY_NAME)
# A fault, the scenarios that detect it, and text of one of their messages.
FAULTS = (
    ("none", {"agents"}, "the DaemonSet selects no node"),
    ("late", {"agents"}, "2 of 3 agents are ready"),
    ("stuck", {"scale", "proxy-stopped"}, "with 3 pods: none of 60 requests reached"),
    ("rules go with the agent", {"proxy-stopped"}, "without an agent: 60 of 60 requests failed"),
    ("rules follow by themselves", {"proxy-stopped"}, "without an agent: unexpected responses from"),
    ("stays away", {"proxy-stopped"}, "waiting for an agent on n1"),
    ("let through", {"client-address"}, "Cluster: n1 did not hide the client's address"),
    ("n3 is silent", {"client-address"}, "Cluster: no response through n3"),
    ("hidden", {"client-address"}, "Local: through n2 the client address is 10.244.1.1, not 192.0.2.1"),
    ("n2 is silent", {"client-address"}, "Local: no response through n2"),
    ("all answer", {"client-address"}, "Local: n1 responds without a local endpoint"),
    ("one is lost", {"rolling-update"}, "1 of 500 requests failed: ConnectionRefusedError"),
    ("never updated", {"rolling-update"}, "no request reached a new pod"),
    ("idle", {"rolling-update"}, "only 15 requests made, at least 100 needed"),
)


def outcome(name: str, *faults: str) -> str:
    """Return the result of one scenario on a cluster with these faults."""
    try:
        return BY_NAME[name].try_(Simulated(*faults))  # type: ignore[arg-type]
    except Failed as failure:
        return str(failure)


def test_passes_on_a_working_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """All scenarios pass and restore the cluster's state."""
    cluster = Simulated()
    assert run(cluster, SCENARIOS) == 0  # type: ignore[arg-type]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["ok"] * len(SCENARIOS) + ["all"]
    assert set(cluster.labels.values()) == {""}
    assert cluster.traffic_policy == "Local"


@pytest.mark.parametrize(("fault", "found_by", "message"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_detects_each_fault(fault: str, found_by: set[str], message: str) -> None:
    """Exactly the expected scenarios fail, with a message that names the fault."""
    said = {name: why for name in NAMES if (why := outcome(name, fault))}
    assert said.keys() == found_by
    assert any(message in why for why in said.values()), said


@pytest.mark.parametrize("fault", ["rules go with the agent", "hidden", "stays away"])
def test_failed_scenarios_restore_the_cluster(fault: str) -> None:
    """Label and policy are restored after a failure, unless the cluster refuses to remove the label."""
    cluster = Simulated(fault)
    run(cluster, SCENARIOS)  # type: ignore[arg-type]
    assert cluster.traffic_policy == "Local"
    assert cluster.labels["n1"] == ("kube-proxy" if fault == "stays away" else "")


def test_skips_unsupported_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    """The output names the scenario and the reason; the exit status is 0."""
    cluster = Simulated("kube-proxy", "no ingress")
    assert run(cluster, SCENARIOS) == 0  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "skip  proxy-stopped: the cluster also has kube-proxy, which would run instead\n" in printed
    assert "skip  client-address: ingress-nginx is not installed\n" in printed


def test_one_failure_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """All scenarios run, and the exit status is 1."""
    assert run(Simulated("stuck", "one is lost"), SCENARIOS) == 1  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 5 scenarios failed"
