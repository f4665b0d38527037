"""Threads whose end ends the process; the kubelet restarts the container."""

import threading
from collections.abc import Callable

import structlog

from pykubeproxy.agent.mailbox import Mailbox, Stop
from pykubeproxy.sources import SourceError

log = structlog.get_logger()


def start_thread(name: str, body: Callable[[], None], mailbox: Mailbox) -> None:
    """Run `body` in a thread, and post a Stop when it returns or raises SourceError."""

    def run() -> None:
        try:
            body()
            mailbox.put(Stop(1, f"thread {name} ended"))
        except SourceError as error:
            mailbox.put(Stop(1, str(error)))

    threading.Thread(target=run, name=name, daemon=True).start()


def stop_on_thread_death(mailbox: Mailbox) -> None:
    """Post a Stop if any thread dies of an exception, and log it."""

    def died(args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "unknown"
        try:
            log.error("thread died", thread=name, exc_info=args.exc_value)
        finally:
            # Even if logging fails, for example without memory.
            mailbox.put(Stop(1, f"thread {name} died: {args.exc_value!r}"))

    threading.excepthook = died
