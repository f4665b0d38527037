"""A watch ends within a second, whatever it is waiting for."""

import socket
import threading
import time

import pytest

from pykubeproxy.objects import Kind
from pykubeproxy.sources import Client, Timing, api_watches
from tests.fakes.canned import CHUNKED, CannedServer, chunk
from tests.fakes.cluster import server, service, watches
from tests.fakes.follower import Follower, eventually

# The real times: nothing but stop can end a wait.
PATIENT = Timing()


def stops_at_once(follower: Follower) -> None:
    """Stop it and look at the clock."""
    assert follower.stop() < 1.0
    assert not follower.errors


def test_in_a_quiet_watch() -> None:
    """While the server has nothing to tell."""
    with server(bookmark_seconds=60) as api, Follower(watches(api.url, timing=PATIENT)) as follower:
        api.requests.wait(3, "watch")
        follower.sees()
        stops_at_once(follower)


def test_in_a_flood_of_events() -> None:
    """While events come without a pause."""
    with server() as api, Follower(watches(api.url, Kind.SERVICE, PATIENT)) as follower:
        follower.sees()
        done = threading.Event()

        def flood() -> None:
            number = 0
            while not done.is_set():
                api.store.create(service(f"s{number}"))
                number += 1

        thread = threading.Thread(target=flood)
        thread.start()
        eventually(lambda: len(follower.events) > 50)
        try:
            stops_at_once(follower)
        finally:
            done.set()
            thread.join()


def test_while_the_server_does_not_answer() -> None:
    """A request is made and nothing comes back, not even a status line."""
    with server() as api:
        api.faults.hang()
        with Follower(watches(api.url, timing=PATIENT)) as follower:
            time.sleep(0.3)
            stops_at_once(follower)


def test_in_the_middle_of_a_list() -> None:
    """A list has begun to arrive and does not go on."""

    def half(target: str, connection: socket.socket) -> None:
        connection.sendall(CHUNKED + chunk(b'{"kind": "ServiceList", "items": ['))
        connection.recv(1)

    with CannedServer(half) as canned, Follower(watches(canned.url, Kind.SERVICE, PATIENT)) as follower:
        eventually(lambda: canned.requests)
        time.sleep(0.2)
        stops_at_once(follower)


def test_while_connecting() -> None:
    """A connection that is never accepted: the queue of the listening socket is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        address = listening.getsockname()
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(address)
            fillers.append(filler)
        url = f"http://127.0.0.1:{address[1]}"
        with Follower(watches(url, Kind.SERVICE, PATIENT)) as follower:
            time.sleep(0.3)
            stops_at_once(follower)
        for filler in fillers:
            filler.close()


def test_in_a_pause_after_failures() -> None:
    """The pause after a failure may be half a minute."""
    timing = Timing(first_pause=30.0)
    with Follower(watches("http://127.0.0.1:9", timing=timing)) as follower:
        time.sleep(0.5)
        stops_at_once(follower)


def test_before_it_began() -> None:
    """A watch that was stopped does not start."""
    with server() as api:
        watch = watches(api.url, Kind.SERVICE)[0]
        watch.stop()
        watch.run(lambda event: pytest.fail("an event after stop"))
        assert api.requests.count() == 0


def test_while_the_rate_is_limited() -> None:
    """A request that has to wait for its turn."""
    with server() as api:
        client = Client(master=api.url, qps=0.01, burst=1)
        with Follower(api_watches(client, "n1")) as follower:
            time.sleep(0.3)
            stops_at_once(follower)


def test_exception_of_the_consumer_passes_through() -> None:
    """What the consumer raises is not taken for a fault of the server."""
    with server() as api:

        def broken(event: object) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            watches(api.url, Kind.SERVICE)[0].run(broken)
