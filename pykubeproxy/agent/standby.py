"""Wait while another agent runs on this node, and take over when it ends."""

import signal
import time
from collections.abc import Mapping
from types import FrameType

import structlog

import pykubeproxy
from pykubeproxy.agent.observe.health import Health, health_pages
from pykubeproxy.agent.observe.listeners import Listeners
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.pages import metrics_pages
from pykubeproxy.agent.observe.status import Filter, Status
from pykubeproxy.config import Config
from pykubeproxy.kernel import InstanceLock
from pykubeproxy.objects import Family

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
        lock = InstanceLock.when_free(standby.waits_for)
        if standby.holder:
            log.info("taking over from another agent", waited=round(time.monotonic() - begun, 3))
        return lock
    except SystemExit:
        log.info("stopping while waiting for another agent")
        raise
    finally:
        standby.close()


def _end(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)


class _Standby:
    """The pages of an agent that waits for the end of another one, `holder`."""

    def __init__(self, config: Config, node_name: str, flags: Mapping[str, object]) -> None:
        self._config = config
        self._node_name = node_name
        self._flags = flags
        self.holder = ""
        self._started = time.time()
        # The other agent may have the addresses.
        self._listeners = Listeners(hard_fail=False)

    def waits_for(self, holder: str) -> None:
        """Note which agent runs. Open the health and metrics addresses at the first call."""
        log.info("waiting for another agent", holder=holder)
        before, self.holder = self.holder, holder
        if not before:
            self._serve()

    def close(self) -> None:
        """Close the addresses."""
        self._listeners.close()

    def _serve(self) -> None:
        metrics = Metrics()
        health = health_pages(Health(Family, self._config.iptables.sync_period), metrics.health_served)
        pages = metrics_pages(metrics.page, self._config, self._flags, self._status)
        self._listeners.open(self._config, health, pages)

    def _status(self, filter_: Filter) -> Status:
        return Status(
            version=pykubeproxy.__version__,
            node=self._node_name,
            backend=self._config.iptables_backend.value,
            started=self._started,
            now=time.time(),
            healthy=False,
            ready=False,
            alive=True,
            node_eligible=False,
            families=(),
            waits_for=self.holder,
            filter=filter_,
        )
