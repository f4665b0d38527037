"""What ends the process: a signal, the end of a thread, another configuration file, the loss of the instance lock."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from pykubeproxy.agent.mailbox import Mailbox, Stop
from pykubeproxy.kernel import InstanceLock, KernelError, kill_commands
from pykubeproxy.sources import SourceError

log = structlog.get_logger()


_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# How long a clean stop may take, and then how long to wait for the log, in seconds: 5 together.
STOP_SECONDS, _DRAIN_SECONDS = 4.0, 0.5

# How often to look at files, in seconds, instead of inotify: pyroute2's ignores errors, and it misses a replaced file.
_PERIOD = 1.0


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


class ConfigFileWatch:
    """The configuration file at `path`, as it was last seen.

    A file with another content, or replaced by a rename, ends the process. A ConfigMap update does not: the kubelet swaps
    the symbolic link `..data`, so the path resolves to another file. A removed or moved file has no effect, since a
    restart would fail.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen = self._look()

    def changed(self) -> bool:
        """Return whether the file was written or replaced since the last call."""
        seen, before = self._look(), self._seen
        self._seen = seen or before
        return bool(seen and before and seen[0] == before[0] and seen != before)

    def _look(self) -> tuple[Path, int, bytes] | None:
        """Return the file that the path resolves to, with its inode and content; None if there is none."""
        try:
            target = Path(self.path).resolve(strict=True)
            return target, target.stat().st_ino, target.read_bytes()
        except OSError:
            return None


def watch_files(lock: InstanceLock, config: ConfigFileWatch | None, post: Callable[[Stop], None]) -> None:
    """Lock the instance file anew whenever someone deletes it, and look at the configuration file.

    Return with a Stop posted: when the configuration has changed, or when another agent was faster to lock.
    """
    try:
        while not (config and config.changed()):
            time.sleep(_PERIOD)
            if lock.restore():
                log.warning("instance lock restored", reason="its file was deleted or replaced")
        post(Stop(1, f"configuration file {config.path} was updated"))
    except KernelError as error:
        post(Stop(1, str(error)))
