"""The smoke test passes on a working cluster and detects each simulated fault."""

import pytest

from tests.unit.smoke.simulated import Simulated
from vagrant.smoke.__main__ import run
from vagrant.smoke.cluster import Failed
from vagrant.smoke.scenarios import SCENARIOS

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


def test_agents_may_become_ready_late() -> None:
    """The scenario waits for them."""
    cluster = Simulated()
    found = iter([(0, 0), (3, 2), (3, 3)])
    cluster.desired_and_ready = lambda: next(found)  # type: ignore[method-assign]
    assert BY_NAME["agents"].try_(cluster) == ""  # type: ignore[arg-type]
    assert next(found, None) is None


def test_rolling_updates_repeat_until_there_are_enough_requests() -> None:
    """Each of these sees 88 requests; one failed request ends them."""
    for faults, restarts in (((), 1), (("quick",), 2), (("idle",), 5), (("one is lost",), 1)):
        cluster = Simulated(*faults)
        why = BY_NAME["rolling-update"].try_(cluster)  # type: ignore[arg-type]
        assert cluster.restarts == restarts
        assert bool(why) == (not {"idle", "one is lost"}.isdisjoint(faults))


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
