"""Signals end the program at the end of a context that defers them."""

import signal

import pytest

from pykubeproxy.nodes.ending import deferring


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_deferred_signal_ends_the_program_even_if_the_work_fails(
    number: signal.Signals, ends: type[BaseException], fails: bool
) -> None:
    with pytest.raises(ends) as caught, deferring("later") as asked:
        signal.raise_signal(number)
        assert asked()
        if fails:
            raise OSError
    assert ends is KeyboardInterrupt or caught.value.code == 128 + number  # type: ignore[attr-defined]


def test_a_failure_without_a_signal_is_not_changed() -> None:
    with pytest.raises(OSError, match="bad"), deferring("later"):
        raise OSError("bad")
