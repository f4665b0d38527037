"""Connections survive every API server fault; requests are limited and the agent recovers by itself.

The agent is a separate process with real times, except short timeouts for a server that does not answer.
"""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from pykubeproxy.lab.prober import ProbeTarget
from pykubeproxy.pages.statusz import decode
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, dropped, inside_a_namespace, saved
from tests.fakes.traffic import Traffic, TrafficRoute, echo_command

pytestmark = pytest.mark.root

# The agent logs an outage early.
EARLY_LOG = """
import functools
from pykubeproxy.sources import api, client
client.Contact = functools.partial(client.Contact, limit=3.0)
client.Keepalive = functools.partial(client.Keepalive, idle=1, interval=1)
"""
# Also with short timeouts for a server that does not answer.
SHORT_TIMEOUTS = f"""
{EARLY_LOG}
api.Timing = functools.partial(api.Timing, answer=1.5)
"""
MAIN = """
from pykubeproxy.cli import main
main()
"""
PODS = ("10.244.0.5", "10.244.0.6")
# Minimum duration of a fault, and the limit on requests for three kinds of objects.
FAULT_SECONDS, MAX_REQUESTS_PER_SECOND = 1.5, 20


class AgentNode:
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
    def running(self, settings: str = SHORT_TIMEOUTS) -> Iterator[subprocess.Popen[bytes]]:
        """Run an agent until its rules are written and everything is watched."""
        with self.log.open("wb") as log:
            command = [sys.executable, "-c", settings + MAIN, "run", "--master", self.api.url]
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

    def create_service(self) -> str:
        """Create a Service and return its address."""
        self.services += 1
        address = f"10.96.0.{self.services}"
        self.create(f"web{self.services}", address)
        return address


@pytest.fixture(scope="module")
def agent_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentNode]:
    """One node for all faults; each fault has its own agent."""
    with ExitStack() as stack:
        yield AgentNode(tmp_path_factory.mktemp("agent_node"), stack)


class Fault(NamedTuple):
    """A fault started by `begin` and ended by `end`; `says` is its text in the log."""

    begin: Callable[[FaultyApiServer], object]
    says: str
    end: Callable[[FaultyApiServer], object] = lambda api: api.faults.clear()


def ending_watches(order: Callable[[FaultyApiServer], object]) -> Callable[[FaultyApiServer], object]:
    """Return a fault that also ends all watches, so that new requests meet it."""

    def begin(api: FaultyApiServer) -> None:
        order(api)
        api.faults.end_watches()

    return begin


def failing(
    status: int, retry_after: int | None = None, verb: str = ""
) -> Callable[[FaultyApiServer], object]:
    return ending_watches(lambda api: api.faults.fail(status, 100_000, retry_after=retry_after, verb=verb))


def resets(api: FaultyApiServer) -> None:
    for _ in range(25):
        api.faults.drop_connections()
        time.sleep(0.05)


FAULTS = {
    "away": Fault(lambda api: api.stop(), "Connection refused", lambda api: api.start()),
    "slow": Fault(ending_watches(lambda api: api.faults.delay(1.2)), ""),
    "429": Fault(failing(429, retry_after=1), "asks for fewer requests (429"),
    "500": Fault(failing(500), "the API server failed (500"),
    "401": Fault(failing(401), "does not accept the credentials (401"),
    "410": Fault(failing(410, verb="watch"), "too old (410"),
    "truncated": Fault(ending_watches(lambda api: api.faults.truncate(100_000)), "the API server"),
    "repeated": Fault(ending_watches(lambda api: api.faults.echo()), ""),
    "hanging": Fault(ending_watches(lambda api: api.faults.hang()), "no response from"),
    "resets": Fault(resets, ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_agent_recovers(agent_node: AgentNode, name: str) -> None:
    """Services stay served, and changes during the fault are applied soon after it."""
    api, fault = agent_node.api, FAULTS[name]
    route = TrafficRoute("cluster IP", ProbeTarget("10.96.0.10", 80))
    with agent_node.running() as agent, Traffic([route]) as traffic:
        api.requests.clear()
        begun = time.monotonic()
        fault.begin(api)
        new_address = agent_node.create_service()
        eventually(lambda: fault.says in agent_node.log.read_text())
        time.sleep(max(0.0, begun + FAULT_SECONDS - time.monotonic()))
        duration, requests = time.monotonic() - begun, api.requests.count()
        assert answers(HEALTH, "/livez", 200)
        fault.end(api)
        ended = time.monotonic()
        eventually(lambda: any(new_address in rule for rule in saved()), 40)
        recovered = time.monotonic() - ended
        eventually(lambda: api.watches.running == 3, 40)
        watched = time.monotonic() - ended
        assert agent.poll() is None
    print(
        f"{name}: {requests} requests in {duration:.1f} s; {recovered:.2f} s after its end what came late is served,"
    )
    print(f"and after {watched:.2f} s all is watched again\n{traffic}")
    assert not traffic.failures()
    assert traffic.total() > 50
    assert requests <= MAX_REQUESTS_PER_SECOND * duration
    assert "Traceback" not in agent_node.log.read_text()


@contextmanager
def stopped(api: FaultyApiServer) -> Iterator[None]:
    api.stop()
    try:
        yield
    finally:
        api.start()


@contextmanager
def unplugged(api: FaultyApiServer) -> Iterator[None]:
    """Drop all packets from and to the server; connections stay open."""
    with dropped(int(api.url.rpartition(":")[2])):
        yield


@pytest.mark.parametrize(
    ("outage", "reason"),
    [
        (stopped, "Connection refused"),
        (unplugged, "no packets arrive from the API server"),
    ],
)
def test_an_outage_is_one_log_line_and_its_end_another(
    agent_node: AgentNode,
    outage: Callable[[FaultyApiServer], AbstractContextManager[None]],
    reason: str,
) -> None:
    """Neither is repeated for each kind of objects."""
    with agent_node.running(EARLY_LOG):
        with outage(agent_node.api):
            eventually(lambda: "api server unavailable" in agent_node.log.read_text(), 20)
        eventually(lambda: "api server available again" in agent_node.log.read_text(), 20)
        lines = agent_node.log.read_text().splitlines()
    start, end = (line for line in lines if re.search("api server|watch", line))
    assert re.search(reason, start)
    assert re.search("silence=[0-9.]+s", start)
    assert re.search(reason, end)
    assert re.search("after=[0-9.]+s", end)


def test_status_and_metrics_show_failing_watches(agent_node: AgentNode) -> None:
    """Only while the fault lasts; the agent stays healthy."""

    def failing_watches() -> set[str]:
        status = decode(fetch(METRICS, "/statusz", accept="application/json").body.encode())
        page = fetch(METRICS, "/metrics").body
        ages = re.findall(r'^pykubeproxy_unwatched_seconds\{resource="(\w+)"\} (\S+)$', page, re.MULTILINE)
        assert len(ages) == 3
        found = {it.objects for it in status.unwatched}
        return found if found == {name for name, seconds in ages if float(seconds) > 0} else {"in between"}

    with agent_node.running():
        eventually(lambda: not failing_watches())
        agent_node.api.stop()
        try:
            eventually(lambda: failing_watches() == {"services", "endpointslices", "nodes"})
            assert answers(HEALTH, "/healthz", 200)
        finally:
            agent_node.api.start()
        eventually(lambda: not failing_watches(), 40)
