"""Whatever becomes of the API server: connections go on, it is not asked in a hot loop, and all heals by itself.

The agent is a process of its own, and all times are real but for those that a silent server is given.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from pykubeproxy.agent.observe.status import decode
from pykubeproxy.lab.prober import Target
from tests.fakes.asking import ask
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.follower import eventually
from tests.fakes.process import HEALTH, METRICS, answers, inside_a_namespace, saved
from tests.fakes.traffic import Traffic, Way, echo_command

pytestmark = pytest.mark.root

# The agent as it is, but for how long it listens to a server that says nothing.
IMPATIENT = """
import functools
from pykubeproxy.sources import api
api.Timing = functools.partial(api.Timing, idle=1.5, answer=1.5)
from pykubeproxy.cli import main
main()
"""
PODS = ("10.244.0.5", "10.244.0.6")
# Seconds that a fault lasts at least, and how often a second the server may be asked: that is for three kinds of objects.
LASTS, MOST = 1.5, 20


class Stand:
    """A node with two pods and an agent, in one namespace, and connections to the pods' Service."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        stack.enter_context(inside_a_namespace())
        for address in ("192.168.99.10", *PODS):
            subprocess.run(["ip", "addr", "add", f"{address}/32", "dev", "lo"], check=True)
        subprocess.run(["ip", "route", "add", "10.96.0.0/16", "dev", "lo"], check=True)
        for number, address in enumerate(PODS, 1):
            pod = subprocess.Popen(echo_command(f"pod{number}", address), stdout=subprocess.PIPE)
            stack.callback(pod.wait)
            stack.callback(pod.kill)
            assert pod.stdout
            assert pod.stdout.readline() == b"ready\n"
        self.api: FaultyApiServer = stack.enter_context(server())
        self.log = directory / "agent.log"
        self.api.store.create(node("node1", "192.168.99.10"))
        self.create("web", "10.96.0.10")
        self.services = 10

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """An agent that has its rules in place and watches everything."""
        with self.log.open("wb") as log:
            command = [sys.executable, "-c", IMPATIENT, "run", "--master", self.api.url]
            agent = subprocess.Popen([*command, "--hostname-override=node1"], stderr=log)
        try:
            eventually(lambda: answers(HEALTH, "/readyz", 200), 30)
            eventually(lambda: self.api.watches.running == 3, 30)
            yield agent
        finally:
            self.api.faults.clear()
            agent.kill()
            agent.wait()

    def create(self, name: str, address: str) -> None:
        self.api.store.create(service(name, clusterIP=address))
        self.api.store.create(slice_of(name, *PODS))

    def one_more(self) -> str:
        """Create a Service; returns its address."""
        self.services += 1
        address = f"10.96.0.{self.services}"
        self.create(f"web{self.services}", address)
        return address


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """One for all faults, each with an agent of its own."""
    with ExitStack() as stack:
        yield Stand(tmp_path_factory.mktemp("stand"), stack)


class Fault(NamedTuple):
    """`begin` orders it, `says` is what the log says of it; it ends with `end`."""

    begin: Callable[[FaultyApiServer], object]
    says: str
    end: Callable[[FaultyApiServer], object] = lambda api: api.faults.clear()


def again(order: Callable[[FaultyApiServer], object]) -> Callable[[FaultyApiServer], object]:
    """The fault, and watches that end, so that they meet it."""

    def begin(api: FaultyApiServer) -> None:
        order(api)
        api.faults.end_watches()

    return begin


def failing(
    status: int, retry_after: int | None = None, verb: str = ""
) -> Callable[[FaultyApiServer], object]:
    return again(lambda api: api.faults.fail(status, 100_000, retry_after=retry_after, verb=verb))


def resets(api: FaultyApiServer) -> None:
    for _ in range(25):
        api.faults.drop_connections()
        time.sleep(0.05)


FAULTS = {
    "away": Fault(lambda api: api.stop(), "Connection refused", lambda api: api.start()),
    "slow": Fault(again(lambda api: api.faults.delay(1.2)), ""),
    "429": Fault(failing(429, retry_after=1), "asks for fewer requests (429"),
    "500": Fault(failing(500), "the API server failed (500"),
    "401": Fault(failing(401), "does not accept the credentials (401"),
    "410": Fault(failing(410, verb="watch"), "too old (410"),
    "truncated": Fault(again(lambda api: api.faults.truncate(100_000)), "the API server"),
    "repeated": Fault(again(lambda api: api.faults.echo()), ""),
    "hanging": Fault(again(lambda api: api.faults.hang()), "no data from"),
    "resets": Fault(resets, "the connection to"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_it_heals(stand: Stand, name: str) -> None:
    """What was there is served all the while; what came meanwhile is served soon after."""
    api, fault = stand.api, FAULTS[name]
    web = Way("cluster IP", Target("10.96.0.10", 80))
    with stand.running() as agent, Traffic([web]) as traffic:
        api.requests.clear()
        begun = time.monotonic()
        fault.begin(api)
        late = stand.one_more()
        eventually(lambda: fault.says in stand.log.read_text())
        time.sleep(max(0.0, begun + LASTS - time.monotonic()))
        lasted, asked = time.monotonic() - begun, api.requests.count()
        assert answers(HEALTH, "/livez", 200)
        fault.end(api)
        ended = time.monotonic()
        eventually(lambda: any(late in rule for rule in saved()), 40)
        healed = time.monotonic() - ended
        eventually(lambda: api.watches.running == 3, 40)
        watched = time.monotonic() - ended
        assert agent.poll() is None
    print(
        f"{name}: asked {asked} times in {lasted:.1f} s; {healed:.2f} s after its end what came late is served,"
    )
    print(f"and after {watched:.2f} s all is watched again\n{traffic}")
    assert not traffic.failures()
    assert traffic.total() > 50
    assert asked <= MOST * lasted
    assert "Traceback" not in stand.log.read_text()


def test_an_agent_that_is_cut_off_says_so(stand: Stand) -> None:
    """Status and metrics tell of what is not heard about while that lasts, and no longer; the agent counts as healthy."""

    def unheard() -> set[str]:
        status = decode(ask(METRICS, "/statusz", accept="application/json").body.encode())
        page = ask(METRICS, "/metrics").body
        ages = re.findall(r'^pykubeproxy_unwatched_seconds\{resource="(\w+)"\} (\S+)$', page, re.MULTILINE)
        assert len(ages) == 3
        found = {it.objects for it in status.unwatched}
        return found if found == {name for name, seconds in ages if float(seconds) > 0} else {"in between"}

    with stand.running():
        eventually(lambda: not unheard())
        stand.api.stop()
        try:
            eventually(lambda: unheard() == {"services", "endpointslices", "nodes"})
            assert answers(HEALTH, "/healthz", 200)
        finally:
            stand.api.start()
        eventually(lambda: not unheard(), 40)


def test_a_silent_watch_does_not_wait_for_its_end(stand: Stand) -> None:
    """A watch that stays silent for ever is left, and what is new is listed: nobody has to end the fault."""
    with stand.running():
        stand.api.faults.freeze_watches()
        late = stand.one_more()
        eventually(lambda: any(late in rule for rule in saved()), 40)
