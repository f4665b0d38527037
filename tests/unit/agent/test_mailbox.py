"""The mailbox of the reconcile loop."""

import math
import threading
import time
from concurrent.futures import Future

from pykubeproxy.agent.mailbox import AddressesChanged, Mailbox, Stop
from pykubeproxy.agent.observe.query import Query


def test_messages_arrive_in_order_and_wake_the_loop() -> None:
    mailbox, sent = Mailbox(), [Stop(number, "") for number in range(1000)]
    thread = threading.Thread(target=lambda: [mailbox.put(message) for message in sent])
    begun = time.monotonic()
    thread.start()
    got: list[object] = []
    while len(got) < len(sent):
        got += mailbox.take(math.inf)
    thread.join()
    assert got == sent
    assert time.monotonic() - begun < 5
    assert mailbox.take(0) == []


def test_the_oldest_unhandled_message_counts() -> None:
    """While it waits, and while the loop handles it."""
    now = 0.0
    mailbox = Mailbox(lambda: now)
    assert mailbox.waiting_since() == math.inf
    now = 1.0
    mailbox.put(AddressesChanged())
    now = 2.0
    mailbox.put(AddressesChanged())
    assert mailbox.waiting_since() == 1.0
    assert len(mailbox.take(0)) == 2
    now = 3.0
    mailbox.put(AddressesChanged())
    assert mailbox.waiting_since() == 1.0
    mailbox.handled()
    assert mailbox.waiting_since() == 3.0
    mailbox.take(0)
    mailbox.handled()
    assert mailbox.waiting_since() == math.inf


def test_a_stop_shows_before_the_loop_takes_it() -> None:
    """So a signal that arrives while modules are imported ends the process before it changes the node."""
    mailbox = Mailbox()
    mailbox.put(AddressesChanged())
    assert mailbox.stop() is None
    stops = Stop(0, "SIGTERM"), Stop(1, "later")
    for stop in stops:
        mailbox.put(stop)
    assert mailbox.stop() is stops[0]
    assert mailbox.take(0) == [AddressesChanged(), *stops]


def test_queries_do_not_count_as_waiting() -> None:
    mailbox, query = Mailbox(), Query(lambda *_: None, Future())
    mailbox.ask(query)
    assert mailbox.waiting_since() == math.inf
    assert mailbox.take(math.inf) == [query]
