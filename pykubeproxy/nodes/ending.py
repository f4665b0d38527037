"""Clean up after signals that end the program, as after Ctrl-C."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

ENDING = (signal.SIGTERM, signal.SIGHUP)


def exit_on_signals() -> AbstractContextManager[None]:
    """Raise SystemExit on these signals within the context."""
    return handling(_exit, *ENDING)


@contextmanager
def deferring(message: str) -> Iterator[Callable[[], bool]]:
    """Let signals end the program, as after Ctrl-C, only at the end of the context; print a message at the first one.

    Yield a function that says whether one has come.
    """
    asked: list[int] = []

    def remember(number: int, _: object) -> None:
        if not asked:
            sys.stderr.write(f"\n{message}\n")
        asked.append(number)

    with handling(remember, signal.SIGINT, *ENDING):
        try:
            yield lambda: bool(asked)
        except Exception:
            # The program ends as the signal asks, also if its last work fails.
            if not asked:
                raise
    if asked[:1] == [signal.SIGINT]:
        raise KeyboardInterrupt
    if asked:
        raise SystemExit(128 + asked[0])


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
