"""Wait while another agent runs on this node, take over when it ends, and keep the lock."""

import signal
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FrameType

import structlog

from pykubeproxy.agent.mailbox import Stop
from pykubeproxy.config import Config
from pykubeproxy.kernel import InstanceLock, KernelError, lock_holder

# How often to look for the file of the lock, in seconds.
_PERIOD = 1.0

log = structlog.get_logger()


def take_over(config: Config, node_name: str, flags: Mapping[str, object]) -> InstanceLock:
    """Return the instance lock once no other agent holds it.

    Meanwhile, serve the health and metrics addresses as far as they are free: alive but not ready. SIGTERM and SIGINT
    raise SystemExit with status 0, until the caller sets other handlers.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    standby, begun = _Standby(config, node_name, flags), time.monotonic()
    try:
        lock = InstanceLock(standby.begin)
        if standby.waits:
            log.info("taking over from another agent", waited=round(time.monotonic() - begun, 3))
        return lock
    except SystemExit:
        log.info("stopping while waiting for another agent")
        raise
    finally:
        standby.close()


def keep(lock: InstanceLock, post: Callable[[Stop], None]) -> None:
    """Lock the file anew whenever someone deletes it. Return when another agent was faster, with a Stop posted."""
    try:
        while True:
            time.sleep(_PERIOD)
            if lock.restore():
                log.warning("instance lock restored", reason="its file was deleted or replaced")
    except KernelError as error:
        post(Stop(1, str(error)))


def _end(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)


class _Standby:
    """An agent that waits for the end of another one, once `waits` is set."""

    def __init__(self, config: Config, node_name: str, flags: Mapping[str, object]) -> None:
        self._config = config
        self._node_name = node_name
        self._flags = flags
        self.waits = False
        self._close: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Log which agent runs, and open the health and metrics addresses."""
        self.waits = True
        log.info("waiting for another agent", holder=lock_holder())
        from pykubeproxy.agent.standby_pages import StandbyPages

        self._close = StandbyPages(self._config, self._node_name, self._flags, lock_holder).close
        import_module("pykubeproxy.agent.assembly")  # so that taking over is quick

    def close(self) -> None:
        """Close the addresses."""
        self._close()
