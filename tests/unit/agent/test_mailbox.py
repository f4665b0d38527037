"""What threads tell the agent."""

import math
import threading
import time

import pytest

from pykubeproxy.agent.mailbox import Mailbox, Stop


def test_everything_that_is_there_is_taken_at_once() -> None:
    """In the order in which it came."""
    mailbox = Mailbox()
    messages = [Stop(n, "") for n in range(5)]
    for message in messages:
        mailbox.put(message)
    assert mailbox.take(0) == messages
    assert mailbox.take(0) == []


@pytest.mark.parametrize("seconds", [0.0, -5.0, -math.inf])
def test_no_wait_where_the_time_has_passed(seconds: float) -> None:
    """A time in the past, however far, is no reason to sleep."""
    mailbox, taken = Mailbox(), threading.Event()

    def take() -> None:
        mailbox.take(seconds)
        taken.set()

    threading.Thread(target=take, daemon=True).start()
    came_back = taken.wait(5)
    mailbox.put(Stop(0, ""))
    assert came_back


@pytest.mark.parametrize("seconds", [30.0, 1e30, math.inf])
def test_a_message_ends_any_wait(seconds: float) -> None:
    """Waits longer than the platform's limit are no error."""
    mailbox = Mailbox()
    started = time.monotonic()
    threading.Timer(0.02, mailbox.put, [Stop(0, "now")]).start()
    assert mailbox.take(seconds) == [Stop(0, "now")]
    assert time.monotonic() - started < 10
