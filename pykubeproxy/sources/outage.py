"""The outage of one watch: since when, why, and what to log."""

import time

import structlog

from pykubeproxy.sources.watch import Outage

# The same reason is logged again after this many seconds.
_LOG_INTERVAL = 60.0

log = structlog.get_logger()


class OutageLog:
    """Log the failures of one watch, each reason once a minute, and the recovery.

    An outage counts from the last data received. Silence for `quiet` seconds is an outage too.
    """

    def __init__(self, resource: str, quiet: float) -> None:
        self._resource, self._quiet = resource, quiet
        self._heard = time.monotonic()
        self._logged: dict[str, float] = {}
        self._present: tuple[float, str] | None = None  # start and last reason

    def heard(self) -> None:
        """Note data from the server."""
        self._heard = time.monotonic()

    def silence(self) -> float:
        """Return the seconds since the last data."""
        return time.monotonic() - self._heard

    def failed(self, reason: str, retry_in: float) -> None:
        """Note a failed attempt; the next one follows in `retry_in` seconds."""
        now = time.monotonic()
        self._present = (self._present[0] if self._present else self._heard, reason)
        self._logged = {earlier: at for earlier, at in self._logged.items() if now - at < _LOG_INTERVAL}
        if reason not in self._logged:
            self._logged[reason] = now
            log.warning("watch failed", resource=self._resource, reason=reason, retry_in=f"{retry_in:.1f}s")

    def recovered(self) -> None:
        """Note a success."""
        if present := self._present:
            self._present = None
            seconds = time.monotonic() - present[0]
            log.info("watch recovered", resource=self._resource, after=f"{seconds:.1f}s")

    def outage(self, *, open_again: bool = False) -> Outage | None:
        """Return the current outage; any thread may call it. With `open_again`, only silence counts."""
        present = None if open_again else self._present
        if present is None and (silence := self.silence()) >= self._quiet:
            return Outage(self._resource, silence, "the API server sends nothing")
        return Outage(self._resource, time.monotonic() - present[0], present[1]) if present else None
