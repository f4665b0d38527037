"""The thresholds of the garbage collector."""

import gc

from pykubeproxy import garbage


def test_garbage_is_collected_rarely_until_asked_otherwise() -> None:
    """It is never disabled."""
    garbage.collect_normally()  # commands that ran in this process may have changed it
    usual = gc.get_threshold()
    try:
        garbage.collect_rarely()
        assert gc.isenabled()
        assert gc.get_threshold()[0] > usual[0] > 0
        garbage.collect_normally()
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
