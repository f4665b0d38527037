"""Connections survive every API server fault; requests are limited and the agent recovers by itself.

The agent is a separate process with real times, except short timeouts for a server that does not answer.
"""

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from pykubeproxy.lab.prober import ProbeTarget
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, answers, dropped, inside_a_namespace, running, saved, status
from tests.fakes.traffic import Traffic, TrafficRoute, echo_command
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

# The agent logs an outage early.
EARLY_LOG = """
import functools
from pykubeproxy.sources import api, client
client.Contact = functools.partial(client.Contact, limit=3.0)
client.Keepalive = functools.partial(client.Keepalive, idle=1, interval=1, timeout=2)
api.Timing = functools.partial(api.Timing, quiet=2.0, check=1.0)
"""
# Also with short timeouts for a server that does not answer.
SHORT_TIMEOUTS = f"""
{EARLY_LOG}
api.Timing = functools.partial(api.Timing, answer=1.5)
"""
PODS = ("10.244.0.5", "10.244.0.6")
# Minimum duration of a fault, and the limit on requests for three kinds of objects.
FAULT_SECONDS, MAX_REQUESTS_PER_SECOND = 1.5, 20


@contextmanager
def watching(log: Path, api: FaultyApiServer, settings: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an agent; begin when its rules are written and everything is watched."""
    with running(log, "--master", api.url, "--hostname-override=node1", before=settings) as agent:
        eventually(lambda: answers(HEALTH, "/readyz", 200))
        eventually(lambda: api.watches.running == 3)
        yield agent


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
    with ExitStack() as stack:
        yield AgentNode(tmp_path_factory.mktemp("agent_node"), stack)


@pytest.fixture(scope="module")
def agent(agent_node: AgentNode) -> Iterator[subprocess.Popen[bytes]]:
    """One agent for all faults."""
    with watching(agent_node.log, agent_node.api, SHORT_TIMEOUTS) as agent:
        yield agent


class Fault(NamedTuple):
    """A fault started by `begin` and ended by `end`; `says` is its text in the log."""

    begin: Callable[[FaultyApiServer], object]
    says: str
    end: Callable[[FaultyApiServer], object] = lambda api: api.faults.clear()


def failing(
    status: int, retry_after: int | None = None, verb: str = ""
) -> Callable[[FaultyApiServer], object]:
    return lambda api: api.faults.fail(status, 100_000, retry_after=retry_after, verb=verb)


def resets(api: FaultyApiServer) -> None:
    for _ in range(25):
        api.faults.drop_connections()
        time.sleep(0.05)


FAULTS = {
    "away": Fault(lambda api: api.stop(), "Connection refused", lambda api: api.start()),
    "slow": Fault(lambda api: api.faults.delay(1.2), ""),
    "429": Fault(failing(429, retry_after=1), "asks for fewer requests (429"),
    "500": Fault(failing(500), "the API server failed (500"),
    "401": Fault(failing(401), "does not accept the credentials (401"),
    "410": Fault(failing(410, verb="watch"), "too old (410"),
    "truncated": Fault(lambda api: api.faults.truncate(100_000), "the API server"),
    "repeated": Fault(lambda api: api.faults.echo(), ""),
    "hanging": Fault(lambda api: api.faults.hang(), "no response from"),
    "resets": Fault(resets, ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_agent_recovers(agent_node: AgentNode, agent: subprocess.Popen[bytes], name: str) -> None:
    """Services stay served, and changes during the fault are applied soon after it."""
    api, fault, before = agent_node.api, FAULTS[name], len(agent_node.log.read_text())
    route = TrafficRoute("cluster IP", ProbeTarget("10.96.0.10", 80))
    with Traffic([route]) as traffic:
        api.requests.clear()
        begun = time.monotonic()
        fault.begin(api)
        api.faults.end_watches()  # so that new requests meet the fault
        new_address = agent_node.create_service()
        eventually(lambda: fault.says in agent_node.log.read_text()[before:])
        time.sleep(max(0.0, begun + FAULT_SECONDS - time.monotonic()))
        duration, requests = time.monotonic() - begun, api.requests.count()
        assert answers(HEALTH, "/livez", 200)
        fault.end(api)
        eventually(lambda: any(new_address in rule for rule in saved()))
        eventually(lambda: api.watches.running == 3)
    assert agent.poll() is None
    assert not traffic.failures()
    assert traffic.total() > 50
    assert requests <= MAX_REQUESTS_PER_SECOND * duration
    assert "Traceback" not in agent_node.log.read_text()


def test_status_and_metrics_show_failing_watches(
    agent_node: AgentNode, agent: subprocess.Popen[bytes]
) -> None:
    """Only while the fault lasts; the agent stays healthy."""

    def failing_watches() -> set[str]:
        page = fetch(METRICS, "/metrics").body
        ages = re.findall(r'^pykubeproxy_unwatched_seconds\{resource="(\w+)"\} (\S+)$', page, re.MULTILINE)
        assert len(ages) == 3
        found = {it.objects for it in status().unwatched}
        return found if found == {name for name, seconds in ages if float(seconds) > 0} else {"in between"}

    eventually(lambda: not failing_watches())
    with stopped(agent_node.api):
        eventually(lambda: failing_watches() == {"services", "endpointslices", "nodes"})
        assert answers(HEALTH, "/healthz", 200)
    eventually(lambda: not failing_watches())


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
        (unplugged, "connecting to .* timed out|no response from"),
    ],
)
def test_an_outage_is_one_log_line_and_its_end_another(
    outage: Callable[[FaultyApiServer], AbstractContextManager[None]], reason: str, tmp_path: Path
) -> None:
    """Neither is repeated for each kind of objects."""
    log = tmp_path / "log"
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        with watching(log, api, EARLY_LOG):
            with outage(api):
                eventually(lambda: "api server unavailable" in log.read_text())
            eventually(lambda: "api server available again" in log.read_text())
            lines = log.read_text().splitlines()
    start, end = (line for line in lines if re.search("api server|watch", line))
    assert re.search(reason, start)
    assert re.search("silence=[0-9.]+s", start)
    assert re.search(reason, end)
    assert re.search("after=[0-9.]+s", end)
