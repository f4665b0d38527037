"""Parsers get random input, and a hostile tenant changes objects; all cases that ever failed run again."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pykubeproxy.kernel import Backend
from tests.fuzz.adversary import CASES, Sequence, load_case, run_core
from tests.fuzz.hostile_steps import MOVES, SMALL, sequences
from tests.fuzz.targets import TARGETS, inputs

INPUTS = Path(__file__).parents[1] / "data" / "fuzz"


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
    "path", sorted(INPUTS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_saved_inputs_pass(path: Path) -> None:
    """Inputs that once failed pass now."""
    TARGETS[path.parent.name].run(path.read_bytes())


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(sequences(SMALL, 6), st.sampled_from(Backend), st.sampled_from(["auto", "tree"]))
def test_a_hostile_tenant_harms_no_victim(sequence: Sequence, backend: Backend, dispatch: str) -> None:
    """After each change of the tenant, packets to the victim reach its endpoints."""
    run_core(sequence, backend, dispatch)


@pytest.mark.parametrize("path", sorted(CASES.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("dispatch", ["auto", "tree"])
def test_saved_sequences_pass(path: Path, backend: Backend, dispatch: str) -> None:
    """Sequences that once failed pass now."""
    run_core(load_case(path), backend, dispatch)


@pytest.mark.parametrize("name", sorted(MOVES))
def test_a_move_of_a_hostile_tenant_harms_no_victim(name: str) -> None:
    """Small forms of what a tenant may do on purpose; `python -m tests.fuzz.adversary --move NAME` is the large one."""
    writer = run_core(MOVES[name](SMALL), Backend.NFT, "auto")
    assert writer.done and not writer.refused
