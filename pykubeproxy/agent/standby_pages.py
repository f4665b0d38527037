"""The pages of an agent that waits for the end of another one."""

import time
from collections.abc import Callable, Mapping

import pykubeproxy
from pykubeproxy.agent.observe.health import Health, health_pages
from pykubeproxy.agent.observe.listeners import Listeners
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.pages import metrics_pages
from pykubeproxy.agent.observe.status import Filter, Status
from pykubeproxy.config import Config
from pykubeproxy.objects import Family


class StandbyPages:
    """Serve the health and metrics addresses as far as they are free. `holder` returns which agent runs."""

    def __init__(
        self, config: Config, node_name: str, flags: Mapping[str, object], holder: Callable[[], str]
    ) -> None:
        self._config = config
        self._node_name = node_name
        self._holder = holder
        self._started = time.time()
        # The other agent may have the addresses.
        self._listeners = Listeners(hard_fail=False)
        metrics = Metrics()
        health = health_pages(Health(Family, config.iptables.sync_period), metrics.health_served)
        self._listeners.open(config, health, metrics_pages(metrics.page, config, flags, self._status))

    def close(self) -> None:
        """Close the addresses."""
        self._listeners.close()

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
            waits_for=self._holder(),
            filter=filter_,
        )
