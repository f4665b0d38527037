"""All observers of the reconcile loop: they follow its notices and serve what they know."""

from collections.abc import Callable, Iterable, Mapping

from pykubeproxy.agent import BindFailed
from pykubeproxy.agent.notices import Notice
from pykubeproxy.agent.observe.events import NORMAL, Recorder
from pykubeproxy.agent.observe.handlers import metrics_pages
from pykubeproxy.agent.observe.health import Health, health_pages
from pykubeproxy.agent.observe.health_checks import HealthChecks
from pykubeproxy.agent.observe.history import SyncHistory
from pykubeproxy.agent.observe.listeners import Listeners
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.agent.observe.node_reports import NodeReporter
from pykubeproxy.agent.observe.service_reports import ServiceReporter, SyncLog
from pykubeproxy.config import Config
from pykubeproxy.kernel import system
from pykubeproxy.objects import Family
from pykubeproxy.pages.servicez import NodeObjects
from pykubeproxy.pages.statusz import AgentStatus, PageFilter

_BIND_FAILED = {"health": "FailedToStartProxierHealthcheck", "metrics": "FailedToStartMetricServer"}
# How long `close` waits for queued events to be sent.
_CLOSE_SECONDS = 2.0


class Observers:
    """Hand each notice of the loop to all observers.

    Call from the loop thread only; any thread may read `health`, `metrics` and `history`. No port opens before `serve`.
    """

    def __init__(
        self, config: Config, families: Iterable[Family], recorder: Recorder, health: Health, metrics: Metrics
    ) -> None:
        self.recorder, self.health, self.metrics = recorder, health, metrics
        self.history = SyncHistory()
        self._config = config
        self._checks = HealthChecks(config, families, recorder, lambda: health.state().serving)
        self._listeners = Listeners(config.bind_address_hard_fail)
        # The log comes first: others tell what follows from a sync.
        self._receivers: list[Callable[[Notice], None]] = [
            SyncLog(config.logging.verbosity).notice,
            NodeReporter(recorder).notice,
            self.health.notice,
            self.metrics.notice,
            ServiceReporter(recorder, config.max_affinity_lists).notice,
            self.history.notice,
            self._checks.notice,
        ]

    def add(self, receiver: Callable[[Notice], None]) -> None:
        """Hand notices to this function, too."""
        self._receivers.append(receiver)

    def notice(self, notice: Notice) -> None:
        """Tell all observers what has happened."""
        for receive in self._receivers:
            receive(notice)

    def serve(
        self,
        flags: Mapping[str, object],
        status: Callable[[PageFilter], AgentStatus] | None = None,
        objects: Callable[[PageFilter, bool], NodeObjects | None] | None = None,
    ) -> None:
        """Open the health and metrics addresses and record the event Starting; see `metrics_pages` for the arguments.

        Raises BindFailed, after recording an event, if an address is in use and bindAddressHardFail is set.
        """
        config = self._config
        self._checks.serve(system.raise_open_files())
        health = health_pages(self.health, self.metrics.health_served)
        metrics = metrics_pages(self.metrics.page, config, flags, status, objects)
        try:
            self._listeners.open(config, health, metrics)
        except BindFailed as error:
            self.recorder.on_node(_BIND_FAILED[error.server], str(error), "StartKubeProxy")
            self.close()
            raise
        self.recorder.on_node("Starting", action="StartKubeProxy", type_=NORMAL)

    def retry_listeners(self) -> None:
        """Retry health check ports that could not be opened; call every syncPeriod."""
        self._checks.retry()

    def close(self) -> None:
        """Close all ports and wait up to two seconds for queued events."""
        self._listeners.close()
        self._checks.close()
        self.recorder.close(_CLOSE_SECONDS)
