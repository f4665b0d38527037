"""Commands in pods with the connection settings of other requests: TLS, credentials and proxies."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pykubeproxy.lab.apiserver import ApiServer, Sandbox
from pykubeproxy.sources import Client
from pykubeproxy.sources.exec import ContainerRef, Output, run
from pykubeproxy.sources.failures import Failure, Unauthorized, Unreachable
from tests.fakes.certificates import certificate
from tests.fakes.cluster import kubeconfig, server
from tests.fakes.faulty_apiserver import Order
from tests.fakes.relay import Relay

# Only a proxy could resolve it.
NAME = "api.example:6443"
AT = ContainerRef("default", "one", "main")
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "one", "namespace": "default"},
    "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "x"}]},
    "status": {"phase": "Running"},
}
Connect = Callable[..., Client]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def api(tls: tuple[Path, Path]) -> Iterator[ApiServer]:
    with server(tls=tls, token="right", runtime=lambda _: Sandbox()) as api:
        api.store.create(POD)
        yield api


@pytest.fixture
def connect(api: ApiServer, tls: tuple[Path, Path], tmp_path: Path) -> Connect:
    """Return a function that makes a client of the server by a name that only a proxy resolves."""

    def client(token: str = "right", **more: str) -> Client:
        cluster = {"server": f"https://{NAME}", "tls-server-name": "127.0.0.1"}
        settings = cluster | {"certificate-authority": str(tls[0])} | more
        return Client(str(kubeconfig(api, tmp_path / "kubeconfig", settings, {"token": token})), qps=-1)

    return client


def echo(client: Client) -> Output:
    return run(client, AT, ("sh", "-c", "echo out; echo err >&2; exit 3"))


def test_http_proxy(api: ApiServer, connect: Connect) -> None:
    with Relay(int(api.url.rpartition(":")[2]), proxy=True) as relay:
        assert echo(connect(**{"proxy-url": f"http://127.0.0.1:{relay.port}"})) == (b"out\n", "err\n", 3)
    assert relay.asked[0].startswith(f"CONNECT {NAME} HTTP/1.")


def test_socks_proxy(api: ApiServer, connect: Connect) -> None:
    with Relay(int(api.url.rpartition(":")[2]), socks=True) as relay:
        assert echo(connect(**{"proxy-url": f"socks5://127.0.0.1:{relay.port}"})) == (b"out\n", "err\n", 3)
    assert relay.asked == [NAME]


def test_wrong_token(api: ApiServer, connect: Connect) -> None:
    with pytest.raises(Unauthorized):
        echo(connect("wrong", server=api.url))


def test_server_with_another_name(api: ApiServer, connect: Connect) -> None:
    with pytest.raises(Unreachable, match="no TLS connection"):
        echo(connect(server=api.url, **{"tls-server-name": "other"}))


def test_large_output_over_tls(api: ApiServer, connect: Connect) -> None:
    size = 3 << 20
    output = run(connect(server=api.url), AT, ("head", "-c", str(size), "/dev/zero")).output
    assert output == bytes(size)


def test_end_of_time_ends_the_command(api: ApiServer, connect: Connect) -> None:
    """A server that stalls holds up nobody, and is told that its client has left."""
    with pytest.raises(Failure, match="sleep in pod default/one did not end within 0 s"):
        run(connect(server=api.url), AT, ("sleep", "60"), seconds=0.3)


def test_connection_that_breaks(api: ApiServer, connect: Connect) -> None:
    api.faults.apply(Order(do="truncate", path="/exec"))  # type: ignore[attr-defined]
    with pytest.raises(Unreachable, match="broke"):
        echo(connect(server=api.url))


def test_program_that_is_missing(api: ApiServer, connect: Connect) -> None:
    with pytest.raises(Failure, match="the image of pod default/one has no no-such-program"):
        run(connect(server=api.url), AT, ("no-such-program",))


def test_container_that_is_missing(api: ApiServer, connect: Connect) -> None:
    with pytest.raises(Failure, match="cannot exec into container other of pod default/one"):
        run(connect(server=api.url), AT._replace(name="other"), ("true",))


def test_unreachable_server(tls: tuple[Path, Path], api: ApiServer, connect: Connect) -> None:
    with pytest.raises(Unreachable, match=r"no connection to https://127.0.0.1:1"):
        echo(connect(server="https://127.0.0.1:1"))
