"""The garbage collector before and after the first sync."""

import gc

from pykubeproxy.agent.memory import collect_garbage_rarely, settle_memory


def test_garbage_is_collected_rarely_until_the_first_sync() -> None:
    """It is never disabled."""
    usual = gc.get_threshold()
    try:
        collect_garbage_rarely()
        assert gc.isenabled()
        assert gc.get_threshold()[0] > usual[0] > 0
        settle_memory()
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
