"""Write log lines to standard error, as text or as one JSON object a line."""

import atexit
import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog

from pykubeproxy.cli.log_queue import LogQueue
from pykubeproxy.cli.terminal import guarded, unguarded
from pykubeproxy.config import LogFormat
from pykubeproxy.wording import printable

# How long to wait at exit for a stalled reader of the log, in seconds.
_EXIT_SECONDS = 1.0


def set_up(format_: LogFormat) -> None:
    """Configure the log format of this process."""
    shared: list[structlog.typing.Processor] = [
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
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _LossyFile(unguarded(sys.stderr)))),
        cache_logger_on_first_use=False,
    )
    atexit.register(_flush_stderr)


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


def _flush_stderr() -> None:
    """Flush now: Python exits with status 120 if its own flush at exit fails."""
    try:
        sys.stderr.flush()
    except OSError:
        sys.stderr = cast("TextIO", None)


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
