"""The smoke test finds a good cluster good, and every fault that it is there to find."""

import pytest

from tests.unit.smoke.simulated import Simulated
from vagrant.smoke.__main__ import run
from vagrant.smoke.cluster import Failed
from vagrant.smoke.scenarios import SCENARIOS

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
NAMES = tuple(BY_NAME)
# A fault, the scenarios that find it, and words of what one of them says.
FAULTS = (
    ("none", {"agents"}, "no node is to have one"),
    ("late", {"agents"}, "2 of 3 are ready"),
    ("stuck", {"scale", "proxy-stopped"}, "with 3 pods: of 60 requests none went to"),
    ("rules go with the agent", {"proxy-stopped"}, "without an agent: 60 of 60 requests failed"),
    ("rules follow by themselves", {"proxy-stopped"}, "without an agent: answered, and should not have"),
    ("stays away", {"proxy-stopped"}, "in vain for an agent on n1"),
    ("let through", {"client-address"}, "Cluster: n1 let the client's address through"),
    ("n3 is silent", {"client-address"}, "Cluster: no answer by way of n3"),
    ("hidden", {"client-address"}, "Local: by way of n2 the client is 10.244.1.1, not 192.0.2.1"),
    ("n2 is silent", {"client-address"}, "Local: no answer by way of n2"),
    ("all answer", {"client-address"}, "Local: n1 answers, and has no endpoint of its own"),
    ("one is lost", {"rolling-update"}, "1 of 500 requests failed: ConnectionRefusedError"),
    ("never updated", {"rolling-update"}, "no request went to a new pod"),
    ("idle", {"rolling-update"}, "only 3 requests were made"),
)


def outcome(name: str, *faults: str) -> str:
    """What one scenario says of a cluster with these faults."""
    try:
        return BY_NAME[name].try_(Simulated(*faults))  # type: ignore[arg-type]
    except Failed as failure:
        return str(failure)


def test_a_good_cluster_is_found_good(capsys: pytest.CaptureFixture[str]) -> None:
    """All scenarios pass, and the cluster is afterwards as it was."""
    cluster = Simulated()
    assert run(cluster, SCENARIOS) == 0  # type: ignore[arg-type]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["ok"] * len(SCENARIOS) + ["all"]
    assert set(cluster.labels.values()) == {""}
    assert cluster.traffic_policy == "Local"


@pytest.mark.parametrize(("fault", "found_by", "words"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_each_fault_is_found(fault: str, found_by: set[str], words: str) -> None:
    """By the scenarios that are meant to, in words that say what is wrong, and by no other."""
    said = {name: why for name in NAMES if (why := outcome(name, fault))}
    assert said.keys() == found_by
    assert any(words in why for why in said.values()), said


@pytest.mark.parametrize("fault", ["rules go with the agent", "hidden", "stays away"])
def test_what_was_changed_is_changed_back(fault: str) -> None:
    """Label and policy are as before, whatever came of it; a label that cannot be taken off is another matter."""
    cluster = Simulated(fault)
    run(cluster, SCENARIOS)  # type: ignore[arg-type]
    assert cluster.traffic_policy == "Local"
    assert cluster.labels["n1"] == ("kube-proxy" if fault == "stays away" else "")


def test_what_a_cluster_does_not_allow_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    """By name and with the reason; that is no failure."""
    cluster = Simulated("kube-proxy", "no ingress")
    assert run(cluster, SCENARIOS) == 0  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "skip  proxy-stopped: kube-proxy would take the agent's place\n" in printed
    assert "skip  client-address: there is no ingress-nginx\n" in printed


def test_one_failure_does_not_hide_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """All are tried, and the exit status tells."""
    assert run(Simulated("stuck", "one is lost"), SCENARIOS) == 1  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines()[-1] == "3 of 5 scenarios failed"
