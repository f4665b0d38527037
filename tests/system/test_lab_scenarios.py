"""The lab's scenarios with real agents, rules and connections."""

import itertools
import os
import re
from collections.abc import Iterator

import pytest

from pykubeproxy.kernel import Backend, Runner, open_iptables
from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.scenarios import SCENARIOS, Scenario, ScenarioFailed
from pykubeproxy.objects import Family
from pykubeproxy.rules import names
from pykubeproxy.rules.ruleset import ChainKey
from tests.fakes.traffic import Crowd
from tests.trace_check import TraceCheck

pytestmark = pytest.mark.root

# Backend and dispatch of the agents by setup. A scenario has too few Services for a dispatch tree, so the tree setup
# adds a crowd.
SETUPS = {"nft": ("nft", "auto"), "tree": ("nft", "tree"), "legacy": ("legacy", "auto")}
CROWD = 64
BRANCHES = {
    names.SERVICES: re.compile(r"-d \S+ -j (KUBE-SVC-\w+)"),
    names.NODEPORTS: re.compile(r"-p tcp -m tcp --dport \d+:\d+ -j (KUBE-SVC-\w+)"),
}
# Scenarios whose rules differ by backend and by dispatch: balancing, recent, REJECT, masquerading.
OTHER_RULES = ("scale", "affinity", "client-address", "edge-cases")
# Scenarios that take long, and that tests/docs runs as examples.
EXAMPLES = ("agent-stopped", "min-sync-period", "readiness-gate")
CASES = [
    (setup, scenario)
    for setup in SETUPS
    for scenario in SCENARIOS
    if scenario.name in OTHER_RULES or (setup == "nft" and scenario.name not in EXAMPLES)
]
_numbers = itertools.count()


def lab_name(purpose: str) -> str:
    """A unique lab name."""
    return f"{purpose}{os.getpid()}x{next(_numbers)}"


@pytest.fixture(scope="module")
def labs() -> Iterator[dict[str, Lab]]:
    """The lab of each setup, started on first use."""
    made: dict[str, Lab] = {}
    try:
        yield made
    finally:
        for lab in made.values():
            lab.__exit__(None, None, None)


def start_lab(setup: str) -> Lab:
    """A lab with agents; for a tree with a crowd whose addresses leave gaps for the scenarios' Services."""
    backend, dispatch = SETUPS[setup]
    settings = {"pykubeproxy": {"iptablesBackend": backend, "dispatch": dispatch}}
    lab = Lab(lab_name(f"t{setup}"), backend=backend, settings=settings).__enter__()
    if dispatch == "tree":
        nobody = ("10.244.1.254", "fd00:10:244:1::fe")
        Crowd(lab.api, [nobody], stride=4).create(range(CROWD))
    return lab


@pytest.mark.parametrize(
    ("setup", "scenario"), CASES, ids=[f"{setup}-{scenario.name}" for setup, scenario in CASES]
)
def test_scenario(
    labs: dict[str, Lab], monkeypatch: pytest.MonkeyPatch, setup: str, scenario: Scenario
) -> None:
    """Connections agree with the scenario's checks and with trace."""
    if setup not in labs:
        labs[setup] = start_lab(setup)
    lab = labs[setup]
    lab.reset()
    entries: list[object] = []
    trace_check = TraceCheck(lab, Backend(SETUPS[setup][0]), monkeypatch)
    scenario.run(lab, lambda *entry: entries.append(entry))
    assert entries, "the scenario has a log"
    assert trace_check.compared, "trace was compared"
    if setup == "tree":
        assert_dispatched_by_branches(lab)


def assert_dispatched_by_branches(lab: Lab) -> None:
    """On node1 the Services of the scenario are in branch chains only, in both families."""
    inside = ("ip", "netns", "exec", lab.nodes["node1"].namespace.name)
    for family in Family:
        nat = open_iptables(Backend.NFT, family, Runner(inside)).save(["nat"]).chains
        for chain, branch in BRANCHES.items():
            root = nat[ChainKey("nat", chain)]
            assert not any("default/" in rule for rule in root)
            below = [match[1] for rule in root if (match := branch.fullmatch(rule))]
            assert len(below) > 1
            if (family, chain) == (Family.IPV4, names.SERVICES):
                assert any("default/" in rule for name in below for rule in nat[ChainKey("nat", name)])


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario_fails_without_rules(labs: dict[str, Lab], scenario: Scenario) -> None:
    """No scenario passes without agents."""
    if "none" not in labs:
        labs["none"] = Lab(lab_name("tnone"), agents=False).__enter__()
        labs["none"].timeout = 0.3
    lab = labs["none"]
    lab.reset()
    with pytest.raises((ScenarioFailed, TimeoutError)):
        scenario.run(lab, lambda *_: None)
