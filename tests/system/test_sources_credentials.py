"""Wrong, expired and renewed credentials, TLS, and commands in pods."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pykubeproxy.lab.apiserver import ApiServer, Sandbox
from pykubeproxy.objects import Kind
from pykubeproxy.sources import Client, SourceError, Watch, api_watches, credential_store
from pykubeproxy.sources.failures import Unreachable
from pykubeproxy.sources.pods import CommandOutput, ContainerRef, run_in_pod
from tests.fakes.cluster import SHORT, certificate, kubeconfig, server, service
from tests.fakes.follower import Follower
from tests.fakes.relay import Relay
from tests.fakes.waiting import eventually


def services(api: ApiServer, folder: Path, **user: Any) -> Watch:
    """A watch of the services with a kubeconfig of this user."""
    path = kubeconfig(api, folder / "kubeconfig", user=user)
    return api_watches(Client(str(path), qps=-1), "n1", SHORT)[0]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


def test_wrong_token_is_logged(tmp_path: Path, tls: tuple[Path, Path]) -> None:
    """A rejected token is one clear message, and the watch retries."""
    with (
        server(tls=tls, token="right") as api,
        capture_logs() as lines,
        Follower([services(api, tmp_path, token="wrong")]) as follower,
    ):
        api.requests.wait(3)
        api.token = "wrong"
        follower.sees()
    assert "does not accept the credentials (401: Unauthorized)" in lines[0]["reason"]


def test_token_file_renewed_after_a_401(tmp_path: Path, tls: tuple[Path, Path]) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    with (
        server(tls=tls, token="first") as api,
        Follower([services(api, tmp_path, tokenFile=str(token))]) as follower,
    ):
        follower.sees()
        token.write_text("second\n")
        api.token = "second"
        api.faults.drop_connections()
        api.store.create(service("a"))
        follower.sees("a")


def test_kubeconfig_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing kubeconfig is a warning; the watch continues."""
    monkeypatch.setattr(credential_store, "_FRESH", 0.0)
    with server() as api, capture_logs() as lines:
        path = tmp_path / "kubeconfig"
        with Follower([services(api, tmp_path)]) as follower:
            follower.sees()
            api.requests.wait(1, "watch")
            text = path.read_text()
            path.unlink()
            api.faults.drop_connections()
            api.store.create(service("a"))
            reason = f"kubeconfig {path} does not exist or is not a file"
            eventually(lambda: any(line.get("reason") == reason for line in lines))
            path.write_text(text)
            follower.sees("a")


def test_tls(tmp_path: Path, tls: tuple[Path, Path]) -> None:
    with (
        server(tls=tls, token="right") as api,
        Follower(api_watches(Client(str(api.kubeconfig(tmp_path / "k"))), "n1", SHORT)) as follower,
    ):
        follower.sees()
        api.store.create(service("a"))
        follower.sees("a")
        api.faults.drop_connections()
        api.store.create(service("b"))
        follower.sees("a", "b")
        follower.sees(kind=Kind.NODE)


def test_certificate_that_is_not_trusted(tls: tuple[Path, Path]) -> None:
    with server(tls=tls) as api:
        with pytest.raises(SourceError, match=r"no TLS connection .*certificate verify failed") as caught:
            api_watches(Client(master=api.url), "n1")[0].once()
        assert "\n" not in str(caught.value)
        assert api.requests.count() == 0


def test_tls_with_a_plain_http_server() -> None:
    with server() as api, pytest.raises(SourceError, match="no TLS connection"):
        api_watches(Client(master=api.url.replace("http:", "https:")), "n1", SHORT)[0].once()


def test_name_that_does_not_resolve() -> None:
    """The name is in the message."""
    with pytest.raises(SourceError, match=r"cannot resolve the name in http://no-such-host\.invalid:6443"):
        api_watches(Client(master="http://no-such-host.invalid:6443"), "n1")[0].once()


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


def echo(client: Client) -> CommandOutput:
    return run_in_pod(client, AT, ("sh", "-c", "echo out; echo err >&2; exit 3"))


def test_http_proxy(api: ApiServer, connect: Connect) -> None:
    with Relay(int(api.url.rpartition(":")[2]), proxy=True) as relay:
        assert echo(connect(**{"proxy-url": f"http://127.0.0.1:{relay.port}"})) == (b"out\n", "err\n", 3)
    assert relay.asked[0].startswith(f"CONNECT {NAME} HTTP/1.")


def test_server_with_another_name(api: ApiServer, connect: Connect) -> None:
    with pytest.raises(Unreachable, match="no TLS connection"):
        echo(connect(server=api.url, **{"tls-server-name": "other"}))
