"""Faults on demand: dropped and hung connections, errors, latency, broken or endless answers, watches gone wrong."""

import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from pykubeproxy.lab.apiserver.store import Store
from pykubeproxy.lab.apiserver.watching import Switch

_BETWEEN_DRIPS = 0.05  # seconds


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do wrong; also the JSON that POST /_lab/faults takes.

    drop: close all connections. hang: say nothing to requests, for some seconds or until release. error: answer
    with a status. delay: answer some seconds late. truncate: end the JSON in the middle (of the last event, on a
    watch), in an answer that is whole as far as HTTP goes. drip: an answer that never ends, with a blank now and
    then. echo: a watch on which each event comes again after the one that follows it. end-watches, freeze-watches
    and thaw-watches mean those running; watches that begin while frozen are frozen, too. compact: forget the
    history, so that old versions are answered 410. clear: everything back to normal.
    """

    do: Literal[
        "drop",
        "hang",
        "release",
        "error",
        "delay",
        "truncate",
        "drip",
        "echo",
        "end-watches",
        "freeze-watches",
        "thaw-watches",
        "compact",
        "clear",
    ]
    verb: str = ""  # only requests with this verb, such as list or watch
    path: str = ""  # only requests whose path contains this
    times: int | None = None  # for so many requests; error and truncate: 1 if not given, else until cleared
    seconds: float | None = None  # delay: how late; hang: for how long from now, for ever if not given
    status: int = 500
    retry_after: int | None = None  # seconds, for error


class Faults:
    """The faults of one server. Orders of which several match a request all apply, the oldest first."""

    def __init__(self, store: Store, watches: Switch, drop: Callable[[], None]) -> None:
        self._store = store
        self._watches = watches
        self._drop = drop
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._released = threading.Event()

    def drop_connections(self) -> None:
        """Close every connection there is, in the middle of whatever it is doing."""
        self._drop()

    def hang(self, seconds: float | None = None, *, verb: str = "", path: str = "") -> None:
        """Accept matching requests and say nothing, for some seconds from now or until `release`."""
        self.carry_out(Order("hang", verb, path, seconds=seconds))

    def release(self) -> None:
        """End `hang`; the requests that hung are answered."""
        with self._lock:
            self._pending = [pending for pending in self._pending if pending.order.do != "hang"]
            self._released.set()
            self._released = threading.Event()

    def fail(
        self, status: int, times: int = 1, *, verb: str = "", path: str = "", retry_after: int | None = None
    ) -> None:
        """Answer the next matching requests with an HTTP status (and a Retry-After of so many seconds)."""
        self.carry_out(Order("error", verb, path, times, status=status, retry_after=retry_after))

    def delay(self, seconds: float, times: int | None = None, *, verb: str = "", path: str = "") -> None:
        """Answer matching requests that much later, until `clear` or for so many requests."""
        self.carry_out(Order("delay", verb, path, times, seconds))

    def truncate(self, times: int = 1, *, verb: str = "", path: str = "") -> None:
        """End the JSON of the next matching answers in the middle."""
        self.carry_out(Order("truncate", verb, path, times))

    def drip(self, times: int | None = None, *, verb: str = "", path: str = "") -> None:
        """Begin an answer to matching requests and never end it, until `clear`; yet never be silent for long."""
        self.carry_out(Order("drip", verb, path, times))

    def echo(self, times: int | None = None, *, path: str = "") -> None:
        """On matching watches that begin from now on, send each event again after the one that follows it."""
        self.carry_out(Order("echo", "watch", path, times))

    def end_watches(self) -> None:
        """End all running watches as if their time were up."""
        self._watches.end_all()

    def freeze_watches(self) -> None:
        """Keep watches open and send nothing: no events, no bookmarks, not even their end."""
        self._watches.freeze(True)

    def thaw_watches(self) -> None:
        """Let frozen watches go on; they catch up."""
        self._watches.freeze(False)

    def compact(self) -> None:
        """Forget the history: watches from versions past and continued lists get a 410."""
        self._store.compact()

    def clear(self) -> None:
        """Everything back to normal."""
        self.release()
        self.thaw_watches()
        with self._lock:
            self._pending.clear()

    def carry_out(self, order: Order) -> None:
        """Do what an order says. One about requests stays until it has been used up or cleared."""
        at_once: dict[str, Callable[[], None]] = {
            "drop": self.drop_connections,
            "release": self.release,
            "end-watches": self.end_watches,
            "freeze-watches": self.freeze_watches,
            "thaw-watches": self.thaw_watches,
            "compact": self.compact,
            "clear": self.clear,
        }
        if order.do in at_once:
            at_once[order.do]()
            return
        with self._lock:
            self._pending.append(_Pending(order))

    def meet(self, verb: str, path: str) -> list[Order]:
        """The orders that apply to a request; each is used up by one. Waits out delays and hangs."""
        with self._lock:
            met = [pending for pending in self._pending if pending.applies(verb, path)]
            self._pending = [pending for pending in self._pending if pending.left != 0]
            released = self._released
        for pending in met:
            pending.wait(released)
        return [pending.order for pending in met]

    def endless(self, send: Callable[[bytes], None]) -> None:
        """Send an answer that has no end, as `drip` orders; returns after `clear`."""
        with self._lock:
            released = self._released
        send(b"{")
        while not released.wait(_BETWEEN_DRIPS):
            send(b" ")


class _Pending:
    """An order about requests, and for how many of them it still stands."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.left = order.times
        if order.times is None and order.do in ("error", "truncate"):
            self.left = 1
        self._end = (
            time.monotonic() + order.seconds if order.do == "hang" and order.seconds is not None else None
        )

    def applies(self, verb: str, path: str) -> bool:
        """Whether a request is meant; if so, it counts."""
        if self.order.verb not in ("", verb) or self.order.path not in path or self.left == 0:
            return False
        if self.left is not None:
            self.left -= 1
        return True

    def wait(self, released: threading.Event) -> None:
        """Let the time pass that the order takes from a request."""
        if self.order.do == "delay":
            released.wait(self.order.seconds or 0)
        elif self.order.do == "hang":
            released.wait(None if self._end is None else max(0.0, self._end - time.monotonic()))
