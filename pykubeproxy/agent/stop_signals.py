"""End the process on SIGTERM and SIGINT: by a message to the reconcile loop, or by force if that takes too long."""

import os
import select
import signal
import threading
from collections.abc import Callable

import structlog

from pykubeproxy.agent.mailbox import Mailbox, Stop
from pykubeproxy.kernel import kill_commands

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How long a clean stop may take, and then how long to wait for the log, in seconds: 5 together.
STOP_SECONDS, _DRAIN_SECONDS = 4.0, 0.5

log = structlog.get_logger()


def stop_on_signals(mailbox: Mailbox, drain_log: Callable[[float], None]) -> None:
    """Post a Stop on the first signal. After four seconds, or on a second signal, kill running commands and exit.

    The exit status is then 128 and the number of the signal. Call from the main thread. Python runs signal handlers in
    the main thread only, which may hang, so another thread reads the signals from a pipe.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_run, args=(reading, mailbox, drain_log), name="signals", daemon=True).start()


def _run(reading: int, mailbox: Mailbox, drain_log: Callable[[float], None]) -> None:
    number = os.read(reading, 1)[0]
    name = signal.Signals(number).name
    mailbox.put(Stop(0, name))
    second_signal, _, _ = select.select([reading], [], [], STOP_SECONDS)
    try:
        reason = "second signal" if second_signal else f"no clean stop within {STOP_SECONDS:g} s"
        log.error("stopping by force, rules stay in place", signal=name, reason=reason)
        drain_log(_DRAIN_SECONDS)
    finally:
        kill_commands()
        os._exit(128 + number)
