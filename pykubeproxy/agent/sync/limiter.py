"""When the next sync is due: at once if that is allowed, never too often, never too seldom."""

import math

# Even without any change the tables are gone through once an hour, as in kube-proxy.
MAX_PERIOD = 3600.0
_FIRST_RETRY = 1.0


class SyncLimiter:
    """A rate limit in kube-proxy's terms, on a clock that the caller reads; all times are seconds.

    The first change is acted on at once. After the end of a run at least `min_period` passes before the next one, and
    whatever was asked for meanwhile is one run. A run that failed is tried again after a second, then after two, four
    and so on up to `retry_period`, or earlier if a change asks for it.
    """

    def __init__(self, min_period: float, retry_period: float, max_period: float = MAX_PERIOD) -> None:
        self._min_period = min_period
        self._retry_period = retry_period
        self._max_period = max_period
        self._ended = -math.inf
        self._requested: float | None = None
        self._at_latest = math.inf
        self._failures = 0

    def adjust(self, min_period: float, retry_period: float) -> None:
        """Go on with other periods, `min_period` from the end of the last run on."""
        self._min_period = min_period
        self._retry_period = retry_period

    def request(self, now: float) -> None:
        """Ask for a run; asking again before it takes place changes nothing."""
        if self._requested is None:
            self._requested = now

    def due(self) -> float:
        """When the next run may start; infinity if there is no reason for one."""
        wanted = self._at_latest if self._requested is None else min(self._requested, self._at_latest)
        return max(wanted, self._ended + self._min_period)

    def started(self) -> None:
        """A run begins: requests that come from now on are for the next one."""
        self._requested = None

    def finished(self, now: float, succeeded: bool) -> None:
        """A run has ended."""
        self._ended = now
        self._failures = 0 if succeeded else self._failures + 1
        self._at_latest = now + (self._max_period if succeeded else self._retry_delay())

    def _retry_delay(self) -> float:
        return min(self._retry_period, _FIRST_RETRY * 2.0 ** min(self._failures - 1, 16))
