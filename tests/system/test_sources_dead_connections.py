"""Connections on which nothing arrives any more: packets are dropped, or a balancer keeps them open."""

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pykubeproxy.sources import Client, Timing, Watch, api_watches
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.transport import Keepalive
from tests.fakes.cluster import SHORT, certificate, server, service
from tests.fakes.follower import Follower
from tests.fakes.kubeconfigs import write_kubeconfig
from tests.fakes.process import dropped, inside_a_namespace
from tests.fakes.relay import Relay
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

# A tenth of the real times, in whole seconds; only keepalive notices the dead connection.
BRIEF = Keepalive(idle=2, interval=1, timeout=3)
QUIET = 4.5  # before packets are dropped
PATIENT = msgspec.structs.replace(SHORT, answer=60.0)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def plain(stack: ExitStack, _: Path) -> tuple[Any, Client, int]:
    api = stack.enter_context(server())
    return api, Client(master=api.url, qps=-1, keepalive=BRIEF), port_of(api.url)


def tls(stack: ExitStack, folder: Path) -> tuple[Any, Client, int]:
    api = stack.enter_context(server(tls=certificate(folder)))
    path = api.kubeconfig(folder / "kubeconfig")
    return api, Client(str(path), qps=-1, keepalive=BRIEF), port_of(api.url)


def proxied(stack: ExitStack, folder: Path) -> tuple[Any, Client, int]:
    """The connection to the proxy is the one that dies."""
    api = stack.enter_context(server(tls=certificate(folder)))
    relay = stack.enter_context(Relay(port_of(api.url), proxy=True))
    cluster = {
        "server": api.url,
        "certificate-authority": str(folder / "certificate.pem"),
        "proxy-url": f"http://127.0.0.1:{relay.port}",
    }
    return api, Client(write_kubeconfig(folder, cluster), qps=-1, keepalive=BRIEF), relay.port


@pytest.mark.parametrize("way", [plain, tls, proxied])
def test_a_dead_connection_is_noticed_and_replaced(
    way: Callable[[ExitStack, Path], tuple[Any, Client, int]], tmp_path: Path
) -> None:
    """Long before the watch ends; the outage counts from the last data that arrived."""
    with ExitStack() as stack:
        stack.enter_context(inside_a_namespace())
        api, client, port = way(stack, tmp_path)
        watch: Watch = api_watches(client, "n1", PATIENT)[0]
        follower = stack.enter_context(Follower([watch]))
        follower.sees()
        api.requests.wait(1, "watch")
        time.sleep(QUIET)
        with dropped(port):
            started = time.monotonic()
            api.store.create(service("a"))
            eventually(lambda: watch.outage)
            assert BRIEF.timeout - BRIEF.idle - 0.5 < time.monotonic() - started
            assert watch.outage
            assert BRIEF.timeout - 0.5 < watch.outage.seconds - QUIET < BRIEF.timeout + 2.5
            assert re.match("the connection to .* broke", watch.outage.reason)
        follower.sees("a")
        eventually(lambda: not watch.outage)
        assert follower.lists() == 1


def test_the_real_times() -> None:
    """A dead connection and a server that does not answer are noticed within a minute."""
    keepalive, timing = Keepalive(), Timing()
    probes = range(keepalive.idle, 60, keepalive.interval)
    assert min(probe for probe in probes if probe > keepalive.timeout) <= 45
    assert timing.quiet + max(timing.check, Contact().limit) < 60
    assert timing.answer < 60
