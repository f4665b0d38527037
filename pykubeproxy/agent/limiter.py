"""Limit the rate of syncs, retry failed ones, request one at least once an hour; limit work to a share of the time."""

import math

# A full sync happens this often even without a change, in seconds, as in kube-proxy.
MAX_PERIOD = 3600.0
_FIRST_RETRY = 1.0


class SyncLimiter:
    """Limit the rate of syncs as kube-proxy does. It reads no clock: the caller passes the time in, in seconds.

    The first request is due at once. The next sync starts `min_period` after the end of the last one at the earliest, and
    serves all requests since then. A failed sync is retried after 1 s, then after 2, 4, … up to `retry_period`, or
    earlier on request.
    """

    def __init__(self, min_period: float, retry_period: float) -> None:
        self._min_period = min_period
        self._retry_period = retry_period
        self._ended = -math.inf
        self._at_latest = math.inf
        self._failures = 0

    def due(self, requested: float) -> float:
        """Return when the next sync may start, after the oldest request; infinity if there is no reason for one."""
        return max(min(requested, self._at_latest), self._ended + self._min_period)

    def finished(self, now: float, succeeded: bool) -> None:
        """Record that a sync has ended."""
        self._ended = now
        self._failures = 0 if succeeded else self._failures + 1
        self._at_latest = now + (MAX_PERIOD if succeeded else backoff(self._failures, self._retry_period))


class TimeShare:
    """Limit work to a share of the time. It reads no clock: the caller passes the time in, in seconds.

    Pieces of work of less than `short` seconds may use up to `saved` seconds of the past in which there was no work.
    After failed pieces of work in a row, the next one waits at least 1 s, 2, 4, … up to `retry_period`.
    """

    def __init__(
        self, share: float, retry_period: float = 0.0, short: float = 0.0, saved: float = 0.0
    ) -> None:
        self._share = share
        self._retry_period = retry_period
        self._short = short
        self._saved = saved
        self._failures = 0
        self._used_until = self._due = -math.inf

    def due(self, is_new: bool = False) -> float:
        """Return when the next piece of work may start; failures do not delay new work."""
        return self._used_until if is_new else self._due

    def worked(self, begun: float, now: float, succeeded: bool = True) -> None:
        """Record the end of a piece of work."""
        self._failures = 0 if succeeded else self._failures + 1
        least = 0.0 if succeeded else backoff(self._failures, self._retry_period)
        saved = self._saved if now - begun < self._short else 0.0
        self._used_until = max(self._used_until, begun - saved) + (now - begun) / self._share
        self._due = max(now + least, self._used_until)


def backoff(failures: int, longest: float) -> float:
    """Return the seconds to wait after some failures in a row: 1, 2, 4, … up to `longest`."""
    return min(longest, _FIRST_RETRY * 2.0 ** min(failures - 1, 16))
