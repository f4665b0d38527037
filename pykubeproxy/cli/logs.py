"""Write log lines to standard error, as text or as one JSON object a line.

Lines about the same objects are limited. A bounded queue keeps a stalled reader of the log from blocking a thread.
"""

import atexit
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

from pykubeproxy.cli.terminal import guarded, unguarded
from pykubeproxy.config import LogFormat
from pykubeproxy.objects import Key
from pykubeproxy.report_limit import ReportLimit
from pykubeproxy.wording import printable

# How long to wait at exit for a stalled reader of the log, in seconds.
_EXIT_SECONDS = 1.0
# Lines about objects in each period of this many seconds: for each object and kind of line, each namespace, each kind.
_PERIOD, _PER_OBJECT, _PER_NAMESPACE, _IN_ALL = 60.0, 3, 20, 100
# Lines that an operator asks for with -v, such as those about each endpoint, are details.
_DETAILS_PER_OBJECT, _DETAILS_PER_NAMESPACE = 100, 500
# How many namespaces a summary names.
_MOST_NAMESPACES = 5
# While the reader stalls, keep this many texts; a text is a log line or a part of a traceback.
_MOST_TEXTS = 10_000
# Write up to this many texts at once: after each write, the thread may wait for the interpreter lock.
_BATCH = 500

log = structlog.get_logger()


def set_up(format_: LogFormat) -> None:
    """Configure the log format of this process.

    A line about an object that others may change names it as `about`, which is not written; a `detail` may come more often.
    Beyond some such lines, only their number is logged.
    """
    limited = LimitedLines()
    shared: list[structlog.typing.Processor] = [
        limited,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    last: list[structlog.typing.Processor] = [structlog.processors.JSONRenderer()]
    if format_ is LogFormat.TEXT:
        # If "rich" is installed, structlog prints local variables in tracebacks, which may be secrets.
        plain = structlog.dev.plain_traceback
        last = [
            _on_one_line,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), pad_event_to=0, sort_keys=False, exception_formatter=plain
            ),
        ]
    structlog.configure(
        processors=[*shared, *last],
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _LossyFile(unguarded(sys.stderr)))),
        cache_logger_on_first_use=False,
    )
    atexit.register(_flush_stderr)
    atexit.register(limited.summarize)


def _flush_stderr() -> None:
    """Flush now: Python exits with status 120 if its own flush at exit fails."""
    try:
        sys.stderr.flush()
    except OSError:
        sys.stderr = cast("TextIO", None)


class LimitedLines:
    """Omit lines about objects beyond the limit, and log how many at the end of the period. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit = ReportLimit(_PERIOD, _PER_OBJECT, _PER_NAMESPACE, _IN_ALL)
        self._details = ReportLimit(_PERIOD, _DETAILS_PER_OBJECT, _DETAILS_PER_NAMESPACE)
        self._lock = threading.Lock()
        self._omitted: dict[str, Counter[str]] = {}  # by line and namespace

    def __call__(
        self, _: structlog.typing.WrappedLogger, __: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Return a line without `about` and `detail`. Raises DropEvent for a line beyond the limit."""
        about: Key | None = event.pop("about", None)
        limit = self._details if event.pop("detail", False) else self._limit
        if about is None:
            return event
        with self._lock:
            if limit.admits(event["event"], about, self._clock()):
                return event
            if not self._omitted:
                timer = threading.Timer(_PERIOD, self.summarize)
                timer.name, timer.daemon = "log-limit", True
                timer.start()
            self._omitted.setdefault(event["event"], Counter())[about.namespace] += 1
        raise structlog.DropEvent

    def summarize(self) -> None:
        """Log how many lines were omitted since the last summary."""
        with self._lock:
            omitted, self._omitted = self._omitted, {}
        for line, namespaces in omitted.items():
            named = [namespace for namespace, _ in namespaces.most_common(_MOST_NAMESPACES) if namespace]
            log.warning(
                "similar log lines omitted", line=line, lines=namespaces.total(), namespaces=", ".join(named)
            )


# The renderer quotes and escapes values with one of these characters.
_QUOTED = frozenset(" \t=\r\n\"'")


def _on_one_line(
    _: structlog.typing.WrappedLogger, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape line breaks, so that no value can forge a log line; only tracebacks have several lines."""
    event["event"] = printable(str(event["event"]))
    for key, value in event.items():
        if key in ("exception", "stack"):
            event[key] = "\n".join(map(printable, str(value).split("\n")))
        elif isinstance(value, str) and _QUOTED.isdisjoint(value):
            event[key] = printable(value)
    return event


class _LossyFile:
    """A file that drops what it cannot write: a full disk or closed pipe must not stop the agent."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()


class LogQueue:
    """A file that writes to another one in a thread.

    It drops and counts lines that do not fit into the queue or cannot be written. When the queue is empty again, a log
    line says how many were dropped. Any thread may call it.
    """

    def __init__(self, file: TextIO, most_texts: int = _MOST_TEXTS) -> None:
        self._file = file
        # Write to the descriptor: a thread that blocks in `file.write` holds a lock, which aborts Python at exit.
        self._descriptor = file.fileno()
        self._queue: queue.Queue[str | threading.Event] = queue.Queue(most_texts)
        self._lock = threading.Lock()
        self._dropped = self._reported = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, text: str) -> int:
        """Queue a text, or drop it."""
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._drop(text.count("\n"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: callers must not wait for the reader."""

    def drain(self, seconds: float) -> None:
        """Wait up to this time until everything queued so far is written."""
        deadline, drained = time.monotonic() + seconds, threading.Event()
        with suppress(queue.Full):
            self._queue.put(drained, timeout=seconds)
            drained.wait(max(0.0, deadline - time.monotonic()))

    def dropped_lines(self) -> int:
        """Return how many lines were dropped."""
        return self._dropped

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            with suppress(queue.Empty):
                while len(batch) < _BATCH:
                    batch.append(self._queue.get_nowait())
            written = self._write("".join(text for text in batch if isinstance(text, str)))
            for drained in batch:
                if isinstance(drained, threading.Event):
                    drained.set()
            if written and self._dropped > self._reported and self._queue.empty():
                lines, self._reported = self._dropped - self._reported, self._dropped
                log.warning("log lines dropped", lines=lines)

    def _write(self, text: str) -> bool:
        """Write a text; drop what cannot be written, because the disk is full or the pipe closed."""
        data = text.encode(self._file.encoding or "utf-8", "backslashreplace")
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError:
                self._drop(data.count(b"\n"))
                return False
        return True

    def _drop(self, lines: int) -> None:
        with self._lock:
            self._dropped += lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def queue_stderr() -> LogQueue | None:
    """Put a queue before standard error, for log lines, errors and tracebacks; call before `set_up`.

    Returns None if standard error is no file, and so cannot block.
    """
    try:
        queue = LogQueue(sys.stderr)
    except (OSError, ValueError, AttributeError):
        return None
    sys.stderr = guarded(cast("TextIO", queue))
    atexit.register(queue.drain, _EXIT_SECONDS)
    return queue
