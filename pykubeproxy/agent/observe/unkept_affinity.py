"""Report Services that are served without the session affinity that they ask for."""

import structlog

from pykubeproxy.agent.observe.events import Recorder, affinity_not_kept
from pykubeproxy.agent.sync.report import SyncReport
from pykubeproxy.objects import Key

log = structlog.get_logger()


class UnkeptAffinityReporter:
    """Report each such Service once until it is gone, also if it keeps and loses affinity in turns.

    Call from the loop thread only.
    """

    def __init__(self, node_name: str, recorder: Recorder, limit: int) -> None:
        self._node_name = node_name
        self._recorder = recorder
        self._limit = limit
        self._known: set[Key] = set()

    def sync_succeeded(self, report: SyncReport) -> None:
        """Report the Services of a sync that are not known yet."""
        ports = [it.port for it in report.resolved]
        self._known -= {name.service_key for name in report.gone} - {it.name.service_key for it in ports}
        unkept = {it.name.service_key: it.unkept_lists for it in ports if it.unkept_lists}
        for key in sorted(unkept.keys() - self._known):
            log.warning(
                "session affinity not kept", about=key, service=str(key), lists=unkept[key], limit=self._limit
            )
            self._recorder.record(affinity_not_kept(self._node_name, key, unkept[key], self._limit))
        self._known.update(unkept)
