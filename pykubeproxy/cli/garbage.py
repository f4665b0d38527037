"""The garbage collector in commands that hold the rules or objects of a whole cluster."""

import gc

# As in the agent, until it has synced: nearly all objects stay.
_RARE_THRESHOLDS = (10_000, 50, 100)


def collect_garbage_rarely() -> None:
    """Collect garbage rarely from now on, as nearly all objects stay until the command ends."""
    gc.freeze()
    gc.set_threshold(*_RARE_THRESHOLDS)
