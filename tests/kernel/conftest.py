"""Fixtures: real iptables in network namespaces, and the fake, under one interface."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import netns

from pykubeproxy.kernel import Backend, Iptables, Runner, Tables, open_iptables, system
from pykubeproxy.objects import Family
from tests.fakes.iptables import FakeIptables
from tests.kernel.node_network import LinkedNode, empty


@pytest.fixture
def namespace() -> Iterator[str]:
    """Create a network namespace and return its name."""
    name = f"kp-{uuid.uuid4().hex[:10]}"
    netns.create(name)
    yield name
    netns.remove(name)


@pytest.fixture
def runner(namespace: str, tmp_path: Path) -> Runner:
    """Return a runner for commands in the namespace, with its own lock file."""
    return Runner(("ip", "netns", "exec", namespace), {"XTABLES_LOCKFILE": str(tmp_path / "lock")})


@pytest.fixture
def inside(namespace: str) -> Iterator[str]:
    """Run the test in the namespace and return its name."""
    netns.pushns(namespace)
    # A new namespace inherits this setting, which a proxy may have changed.
    system.write_setting("net/ipv4/conf/all/route_localnet", 0)
    yield namespace
    netns.popns()


@pytest.fixture(scope="module")
def network() -> Iterator[LinkedNode]:
    """A node and its neighbours; both backends and families share them."""
    with LinkedNode(f"x{uuid.uuid4().hex[:8]}") as built:
        yield built


@pytest.fixture
def node_tables(network: LinkedNode, backend: Backend, family: Family, tmp_path: Path) -> Iterator[Iptables]:
    """The tables of this node in one backend, empty before and after the test."""
    inside = ("ip", "netns", "exec", network.places["node"].name)
    opened = open_iptables(backend, family, Runner(inside, {"XTABLES_LOCKFILE": str(tmp_path / "lock")}))
    empty(opened)
    yield opened
    empty(opened)


@pytest.fixture(params=[Family.IPV4, Family.IPV6], ids=lambda family: family.value)
def family(request: pytest.FixtureRequest) -> Family:
    """Both families."""
    return request.param


@pytest.fixture(params=[Backend.NFT, Backend.LEGACY], ids=lambda backend: backend.value)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Both backends."""
    return request.param


@pytest.fixture
def iptables(backend: Backend, family: Family, runner: Runner) -> Iptables:
    """Real tables, empty."""
    return open_iptables(backend, family, runner)


@pytest.fixture(
    params=[
        pytest.param((Backend.NFT, False), marks=pytest.mark.root, id="nft"),
        pytest.param((Backend.LEGACY, False), marks=pytest.mark.root, id="legacy"),
        pytest.param((Backend.NFT, True), id="fake-nft"),
        pytest.param((Backend.LEGACY, True), id="fake-legacy"),
    ]
)
def tables(request: pytest.FixtureRequest) -> Tables:
    """Empty IPv4 tables: real ones in both backends, and the fake of each."""
    backend, fake = request.param
    if fake:
        return FakeIptables(backend)
    return open_iptables(backend, Family.IPV4, request.getfixturevalue("runner"))
