"""The mailbox that threads post messages to."""

import math
import threading
import time

import pytest

from pykubeproxy.agent.mailbox import Mailbox, Stop


def test_take_returns_all_waiting_messages() -> None:
    """Messages are returned in the order of arrival."""
    mailbox = Mailbox()
    messages = [Stop(n, "") for n in range(5)]
    for message in messages:
        mailbox.put(message)
    assert mailbox.take(0) == messages
    assert mailbox.take(0) == []


@pytest.mark.parametrize("seconds", [0.0, -5.0, -math.inf])
def test_take_returns_at_once_after_the_deadline(seconds: float) -> None:
    """A timeout of zero or below does not block."""
    mailbox, taken = Mailbox(), threading.Event()

    def take() -> None:
        mailbox.take(seconds)
        taken.set()

    threading.Thread(target=take, daemon=True).start()
    returned = taken.wait(5)
    mailbox.put(Stop(0, ""))
    assert returned


@pytest.mark.parametrize("seconds", [30.0, 1e30, math.inf])
def test_a_message_wakes_a_waiting_take(seconds: float) -> None:
    """Timeouts beyond the platform's limit are no error."""
    mailbox = Mailbox()
    started = time.monotonic()
    threading.Timer(0.02, mailbox.put, [Stop(0, "now")]).start()
    assert mailbox.take(seconds) == [Stop(0, "now")]
    assert time.monotonic() - started < 10
