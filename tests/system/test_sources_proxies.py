"""Requests through proxies, and the headers of requests."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykubeproxy.agent.observe.events import ApiRecorder
from pykubeproxy.lab.apiserver import ApiServer
from pykubeproxy.objects import Key
from pykubeproxy.sources import Client, SourceError, Watch, api_watches
from pykubeproxy.sources.queries import last_changes, server_access
from tests.fakes.canned import CannedServer, whole
from tests.fakes.cluster import SHORT, certificate, kubeconfig, server, service, unverified
from tests.fakes.follower import Follower
from tests.fakes.kubeconfigs import write_kubeconfig
from tests.fakes.relay import Relay
from tests.fakes.waiting import eventually

Write = Callable[..., str]
# The proxy resolves it.
NAME = "api.example:6443"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "REQUEST_METHOD")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with server(tls=certificate(tmp_path), token="right") as api:
        yield api


@pytest.fixture
def write(api: ApiServer, tmp_path: Path) -> Write:
    """Return a function that writes a kubeconfig for the server at https://api.example:6443, with more settings."""

    def write(**more: str) -> str:
        cluster = {"server": f"https://{NAME}", "tls-server-name": "127.0.0.1"}
        authority = {"certificate-authority": str(tmp_path / "certificate.pem")}
        return str(kubeconfig(api, tmp_path / "kubeconfig", cluster | authority | more))

    return write


def port_of(api: ApiServer) -> int:
    return int(api.url.rpartition(":")[2])


def services(kubeconfig: str) -> Watch:
    return api_watches(Client(kubeconfig, qps=-1), "n1", SHORT)[0]


def test_an_http_proxy_gets_user_and_password(api: ApiServer, write: Write) -> None:
    with Relay(port_of(api), proxy=True) as relay:
        services(write(**{"proxy-url": f"http://me:p%40w@127.0.0.1:{relay.port}"})).once()
    (head,) = relay.asked
    assert head.startswith(f"CONNECT {NAME} HTTP/1.")
    assert "Proxy-Authorization: Basic bWU6cEB3\r\n".lower() in head.lower()


@pytest.mark.parametrize(
    ("login", "asked"), [("", [NAME]), ("me:p%40w@", ["me:p@w", NAME])], ids=["without login", "with login"]
)
def test_a_socks_proxy_is_used(api: ApiServer, write: Write, login: str, asked: list[str]) -> None:
    """It resolves the server's name."""
    with Relay(port_of(api), socks=True) as relay:
        path = write(**{"proxy-url": f"socks5://{login}127.0.0.1:{relay.port}"})
        with Follower([services(path)]) as follower:
            follower.sees()
            api.store.create(service("a"))
            follower.sees("a")
    assert relay.asked[: len(asked)] == asked


def test_a_socks_proxy_gets_an_address_as_such(
    api: ApiServer, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Relay(port_of(api), socks=True) as relay:
        monkeypatch.setenv("https_proxy", f"socks5h://127.0.0.1:{relay.port}")
        services(write(server="https://[fd00::1]:6443")).once()
        services(write(server="https://192.0.2.1")).once()
    assert relay.asked == ["fd00::1:6443", "192.0.2.1:443"]


def test_the_reason_of_a_socks_proxy_is_reported(api: ApiServer, write: Write) -> None:
    with Relay(port_of(api), socks=True, reply=5) as relay:
        watch = services(write(**{"proxy-url": f"socks5://127.0.0.1:{relay.port}"}))
        with pytest.raises(SourceError, match="the SOCKS proxy cannot connect: connection refused"):
            watch.once()


@pytest.mark.parametrize("proxied", [False, True])
def test_each_request_names_the_user_to_impersonate(tmp_path: Path, proxied: bool) -> None:
    """Lists, watches, access reviews and events; each group in a header of its own."""
    page = b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1"}, "items": []}'
    with CannedServer(lambda _, connection: connection.sendall(whole(page))) as api:
        cluster = (
            {"server": "http://api.example/prefix", "proxy-url": api.url} if proxied else {"server": api.url}
        )
        user = {"as": "me", "as-groups": ["a", "b"], "as-user-extra": {"k/v": ["x"]}}
        client = Client(write_kubeconfig(tmp_path, cluster, user), qps=-1)
        recorder = ApiRecorder(client, "n1")
        recorder.on_node("Starting")
        server_access(client, "n1")
        with Follower([api_watches(client, "n1", SHORT)[0]]):
            eventually(lambda: any("watch=true" in target for target in api.requests))
        eventually(lambda: any(target.endswith("/events") for target in api.requests))
        recorder.close(5)
    for target, headers in zip(api.requests, api.headers, strict=False):
        assert [(name, value) for name, value in headers if name.startswith("impersonate")] == [
            ("impersonate-user", "me"),
            ("impersonate-group", "a"),
            ("impersonate-group", "b"),
            ("impersonate-extra-k%2fv", "x"),
        ]
        assert target.startswith("http://api.example/prefix/api" if proxied else "/api")
        assert dict(headers)["host"] == ("api.example" if proxied else api.url.removeprefix("http://"))


def test_an_unverified_server_causes_no_warning(api: ApiServer, tmp_path: Path) -> None:
    """The kubeconfig asks for it."""
    path = unverified(api, tmp_path / "kubeconfig")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = Client(path, qps=-1)
        api_watches(client, "n1", SHORT)[0].once()
    assert not caught
    assert not client.verifies_server


def test_objects_are_requested_without_managed_fields() -> None:
    """In lists and watches; when a Service last changed is known from its managedFields alone."""
    page = b'{"kind": "ServiceList", "metadata": {"resourceVersion": "1"}, "items": []}'
    with CannedServer(lambda _, connection: connection.sendall(whole(page))) as api:
        client = Client(master=api.url, qps=-1)
        with Follower([api_watches(client, "n1", SHORT)[0]]):
            eventually(lambda: any("watch=true" in target for target in api.requests))
        count = len(api.requests)
        last_changes(client, [Key("default", "web")])
    accepted = [dict(headers)["accept"] for headers in api.headers]
    assert {*accepted[:count]} == {"application/json;drop=metadata.managedFields"}
    assert {*accepted[count:]} == {"application/json"}
