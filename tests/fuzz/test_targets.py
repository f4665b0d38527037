"""A short look with random input at every reader, and all that ever broke one."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.mutations import inputs
from tests.fuzz.targets import TARGETS

CASES = Path(__file__).parents[1] / "data" / "fuzz"


@pytest.mark.parametrize("name", TARGETS)
def test_random_input(name: str) -> None:
    """Nothing but what the reader says it raises; `make fuzz` does this for longer."""
    target = TARGETS[name]

    @settings(max_examples=80, suppress_health_check=list(HealthCheck))
    @given(inputs(target))
    def run(raw: bytes) -> None:
        target.run(raw)

    run()


@pytest.mark.parametrize(
    "path", sorted(CASES.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_what_once_broke_a_reader(path: Path) -> None:
    """It no longer does."""
    TARGETS[path.parent.name].run(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read(name: str) -> None:
    """A target whose seeds do not get through would look at nothing."""
    for seed in TARGETS[name].seeds:
        TARGETS[name].run(seed)
