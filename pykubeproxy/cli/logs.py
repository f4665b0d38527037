"""How log lines look: for people by default, one JSON object a line on request. They go to standard error."""

import atexit
import logging
import sys
from contextlib import suppress
from typing import TextIO, cast

import structlog

from pykubeproxy.config import LogFormat


def set_up(format_: LogFormat) -> None:
    """Have every log line of the process written in one format from now on."""
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
    ]
    last: list[structlog.typing.Processor] = [structlog.processors.JSONRenderer()]
    if format_ is LogFormat.TEXT:
        # Not with the values of variables, which "rich", where it is installed, would show: there are secrets among them.
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
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Forgiving(sys.stderr))),
        cache_logger_on_first_use=False,
    )
    atexit.register(_give_up)


def _give_up() -> None:
    """Lines that could not be written Python would try to write once more at its end, and exit with status 120."""
    try:
        sys.stderr.flush()
    except OSError:
        sys.stderr = cast("TextIO", None)


# Values with one of these are shown in quotes, with escapes, by the renderer.
_QUOTED = frozenset(" \t=\r\n\"'")


def _on_one_line(
    _: structlog.typing.WrappedLogger, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Nobody's text can make a second line that looks like one of ours; tracebacks alone have several."""
    event["event"] = _plain(str(event["event"]))
    for key, value in event.items():
        if isinstance(value, str) and key not in ("exception", "stack") and _QUOTED.isdisjoint(value):
            event[key] = _plain(value)
    return event


def _plain(text: str) -> str:
    if text.isprintable():
        return text
    escapes = (c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return "".join(escapes)


class _Forgiving:
    """A file that cannot always be written: the disk is full, or who read the pipe has gone.

    That costs lines of the log, and nothing else: rules matter more.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()
