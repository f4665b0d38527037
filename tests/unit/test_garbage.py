"""The thresholds of the garbage collector."""

import gc

from pykubeproxy import garbage


def test_garbage_is_collected_rarely() -> None:
    """It is never disabled, and what is left after a collection does not take part in the next."""
    usual = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        garbage.collect_rarely()
        assert gc.isenabled()
        assert gc.get_threshold()[0] > 700
        frozen = gc.get_freeze_count()
        kept = [[] for _ in range(100)]  # type: list[list[int]]
        garbage.collect_now()
        assert gc.get_freeze_count() >= frozen + len(kept)
        assert gc.get_threshold()[0] > 700
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
