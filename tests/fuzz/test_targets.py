"""Every parser gets some random input, and all inputs that ever failed."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.mutations import inputs
from tests.fuzz.targets import TARGETS

CASES = Path(__file__).parents[1] / "data" / "fuzz"


@pytest.mark.parametrize("name", TARGETS)
def test_random_input(name: str) -> None:
    """The parser raises only documented errors; `make fuzz` runs longer."""
    target = TARGETS[name]

    @settings(max_examples=80, suppress_health_check=list(HealthCheck))
    @given(inputs(target))
    def run(raw: bytes) -> None:
        target.run(raw)

    run()


@pytest.mark.parametrize(
    "path", sorted(CASES.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_saved_inputs_pass(path: Path) -> None:
    """Inputs that once failed pass now."""
    TARGETS[path.parent.name].run(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_parsed(name: str) -> None:
    """The seeds are valid input, so mutations reach deep code."""
    for seed in TARGETS[name].seeds:
        TARGETS[name].run(seed)
