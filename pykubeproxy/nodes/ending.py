"""Clean up after signals that end the program, as after Ctrl-C."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

ENDING = (signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> AbstractContextManager[None]:
    """Raise SystemExit on these signals within the context."""
    return handling(_exit, *ENDING)


def _exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def handling(
    handler: Callable[[int, Any], Any] | signal.Handlers, *signals: signal.Signals
) -> Iterator[None]:
    """Handle signals in another way within the context."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
