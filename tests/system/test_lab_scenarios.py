"""The lab's scenarios, each with real agents, real rules and real connections."""

import itertools
import os
from collections.abc import Iterator

import pytest

from pykubeproxy.lab.cluster import Lab
from pykubeproxy.lab.scenarios import SCENARIOS, Scenario, ScenarioFailed

pytestmark = pytest.mark.root

# On legacy those whose rules the two backends treat differently: balancing, recent, REJECT, masquerading.
LEGACY = ("scale", "affinity", "node-port", "corners")
CASES = [
    *(("nft", scenario) for scenario in SCENARIOS),
    *(("legacy", scenario) for scenario in SCENARIOS if scenario.name in LEGACY),
]
_numbers = itertools.count()


def lab_name(purpose: str) -> str:
    """A name that no other test has."""
    return f"{purpose}{os.getpid()}x{next(_numbers)}"


@pytest.fixture(scope="module")
def labs() -> Iterator[dict[str, Lab]]:
    """A lab for each backend, made when it is first asked for."""
    made: dict[str, Lab] = {}
    try:
        yield made
    finally:
        for lab in made.values():
            lab.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("backend", "scenario"), CASES, ids=[f"{backend}-{scenario.name}" for backend, scenario in CASES]
)
def test_scenario(labs: dict[str, Lab], backend: str, scenario: Scenario) -> None:
    """Connections see what the scenario promises."""
    if backend not in labs:
        labs[backend] = Lab(lab_name(f"t{backend}"), backend=backend).__enter__()
    lab = labs[backend]
    lab.reset()
    told: list[object] = []
    scenario.run(lab, lambda *seen: told.append(seen))
    assert told, "a scenario tells what it saw"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_fails_without_rules(labs: dict[str, Lab], scenario: Scenario) -> None:
    """A scenario notices when nobody programs the nodes: none of them passes by itself."""
    if "none" not in labs:
        labs["none"] = Lab(lab_name("tnone"), agents=False).__enter__()
        labs["none"].patience = 0.3
    lab = labs["none"]
    lab.reset()
    with pytest.raises((ScenarioFailed, TimeoutError)):
        scenario.run(lab, lambda *_: None)
