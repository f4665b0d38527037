"""The one request a watch has under way, which another thread can end at any point of it."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import urllib3

from pykubeproxy.sources import failures


class Stopped(Exception):
    """The watch is to end."""

    def __str__(self) -> str:
        return "it was stopped"


class Exchange:
    """Requests, one after the other, and the pauses between them. `stop` is for any thread, the rest for one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._answers: queue.SimpleQueue[urllib3.BaseHTTPResponse | BaseException] = queue.SimpleQueue()
        self._response: urllib3.BaseHTTPResponse | None = None

    def stop(self) -> None:
        """End what is under way: it raises Stopped, as does everything after it."""
        with self._lock:
            self._stopping.set()
            self._answers.put(Stopped())
            if self._response is not None:
                # This wakes the reading thread, for which close() would wait; it may have ended by itself.
                with suppress(OSError, ValueError, RuntimeError):
                    self._response.shutdown()

    def pause(self, seconds: float) -> None:
        """Wait. Raises Stopped."""
        if self._stopping.wait(seconds):
            raise Stopped

    @contextmanager
    def answer(self, ask: Callable[[], urllib3.BaseHTTPResponse]) -> Iterator[Iterator[bytes]]:
        """The pieces of the body that `ask` gets, as they arrive. Raises Stopped, or Failure if it breaks off."""
        response = self._begin(ask)
        try:
            yield self._pieces(response)
        finally:
            with self._lock:
                self._response = None
            response.close()
            response.release_conn()

    def _begin(self, ask: Callable[[], urllib3.BaseHTTPResponse]) -> urllib3.BaseHTTPResponse:
        # In a thread, since resolving a name, connecting, TLS and credential plugins cannot be woken; it is left to
        # itself when the watch ends.
        if self._stopping.is_set():
            raise Stopped
        threading.Thread(target=self._ask, args=(ask,), name=f"{self._name}-request", daemon=True).start()
        outcome = self._answers.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _ask(self, ask: Callable[[], urllib3.BaseHTTPResponse]) -> None:
        try:
            response = ask()
        except BaseException as error:
            self._answers.put(error)
            return
        with self._lock:
            if not self._stopping.is_set():
                self._response = response
                self._answers.put(response)
                return
        response.close()

    def _pieces(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        try:
            # Nothing compressed was asked for, and a few bytes of it can come to any number of them.
            while data := response.read1(1 << 16, decode_content=False):
                if self._stopping.is_set():
                    break
                yield data
        except Exception as error:
            # Whatever the client library raises while it reads, the answer has broken off.
            if not self._stopping.is_set():
                raise failures.of_exception(error, "the API server") from None
        if self._stopping.is_set():
            raise Stopped from None
