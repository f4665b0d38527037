"""Commands in containers of pods, over WebSocket."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from pykubeproxy.sources import Client
from pykubeproxy.sources.failures import Failure, Forbidden, NotFound, Unauthorized, Unreachable
from pykubeproxy.sources.pods import CommandOutput, ContainerRef, NotInImage, run_in_pod
from tests.fakes.canned import CannedServer, whole
from tests.fakes.kubeconfigs import write_kubeconfig
from tests.fakes.websocket import STDERR, STDOUT, SUCCESS, V5, accept, end, exit_status, message, status

AT = ContainerRef("kube-system", "proxy-1", "kube-proxy")
SAVE = ("iptables-save", "-c")
Settings = Callable[[str], Client]


def plain(url: str) -> Client:
    return Client(master=url, qps=-1)


def served(*frames: bytes, protocol: str = V5, make: Settings = plain, **limits: float) -> CommandOutput:
    """Run SAVE on a server that sends these frames."""

    def answer(_: str, connection: socket.socket) -> None:
        accept(connection, server.headers[-1], protocol)
        connection.sendall(b"".join(frames))

    with CannedServer(answer) as server:
        return run_in_pod(make(server.url), AT, SAVE, **limits)  # type: ignore[arg-type]


def refused(code: str, reason: str) -> Failure:
    """Return the failure for a server that refuses the upgrade."""
    body = json.dumps({"kind": "Status", "message": reason}).encode()

    with (
        CannedServer(lambda _, connection: connection.sendall(whole(body, code))) as server,
        pytest.raises(Failure) as failure,
    ):
        run_in_pod(plain(server.url), AT, SAVE)
    return failure.value


@pytest.mark.parametrize("protocol", ["v5.channel.k8s.io", "v4.channel.k8s.io"])
def test_output_errors_and_exit_code_are_apart(protocol: str) -> None:
    """Messages of both outputs may alternate; the first one is empty, as a real server sends it."""
    frames = (
        message(STDOUT, b""),
        message(STDOUT, b"*nat\n"),
        message(STDERR, b"# Warning\n"),
        message(STDOUT, b"x" * 70_000),
        exit_status(3),
        end(),
    )
    assert served(*frames, protocol=protocol) == (b"*nat\n" + b"x" * 70_000, "# Warning\n", 3)


def test_connection_that_breaks_after_the_status_is_an_answer() -> None:
    assert served(message(STDOUT, b"a"), status(SUCCESS)) == (b"a", "", 0)


def test_request_names_container_and_command(tmp_path: Path) -> None:
    """The request has the credentials and the impersonation of the kubeconfig, and no Origin."""
    requests: list[tuple[str, dict[str, str]]] = []

    def answer(target: str, connection: socket.socket) -> None:
        requests.append((target, dict(server.headers[-1])))
        accept(connection, server.headers[-1])
        connection.sendall(status(SUCCESS) + end())

    with CannedServer(answer) as server:
        path = write_kubeconfig(tmp_path, {"server": server.url}, {"as": "ann", "as-groups": ["dev"]})
        run_in_pod(Client(path, qps=-1), AT, SAVE)
    ((target, headers),) = requests
    assert urlsplit(target).path == "/api/v1/namespaces/kube-system/pods/proxy-1/exec"
    assert parse_qsl(urlsplit(target).query) == [
        ("command", "iptables-save"),
        ("command", "-c"),
        ("container", "kube-proxy"),
        ("stdout", "true"),
        ("stderr", "true"),
    ]
    assert headers["sec-websocket-protocol"] == "v5.channel.k8s.io,v4.channel.k8s.io"
    assert (headers["impersonate-user"], headers["impersonate-group"]) == ("ann", "dev")
    assert "origin" not in headers


@pytest.mark.parametrize(
    ("code", "reason", "kind", "message"),
    [
        (
            "403 Forbidden",
            'pods "proxy-1" is forbidden: User "ann" cannot create',
            Forbidden,
            "cannot create): a role must grant get and create of pods/exec, as manifests/inspect/rbac.yaml does",
        ),
        ("404 Not Found", 'pods "proxy-1" not found', NotFound, "pod kube-system/proxy-1 does not exist"),
        (
            "400 Bad Request",
            "container kube-proxy is not valid for pod proxy-1",
            Failure,
            "cannot exec into container kube-proxy of pod kube-system/proxy-1 (400: container",
        ),
        (
            "500 Internal Server Error",
            "error dialing backend: dial tcp: i/o timeout",
            Failure,
            "cannot reach the kubelet of pod kube-system/proxy-1 (500: error dialing",
        ),
        ("401 Unauthorized", "Unauthorized", Unauthorized, "does not accept the credentials (401: Unauth"),
    ],
)
def test_refusals(code: str, reason: str, kind: type[Failure], message: str) -> None:
    """A missing permission names both verbs, a missing container the pod."""
    failure = refused(code, reason)
    assert type(failure) is kind
    assert message in str(failure)


def test_redirects_are_not_followed() -> None:
    """They would carry the credentials to another server."""
    answer = whole(b"", "302 Found", "Location: http://127.0.0.1:1/\r\n")
    with CannedServer(lambda _, connection: connection.sendall(answer)) as server, pytest.raises(Failure):
        run_in_pod(plain(server.url), AT, SAVE)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "frame",
    [
        # containerd
        status(
            {
                "status": "Failure",
                "reason": "InternalError",
                "message": 'error executing command in container: exec: "iptables-save": executable file not found in $PATH',
            }
        ),
        # CRI-O
        exit_status(1, 'exec failed: exec: "iptables-save": executable file not found in `$PATH`'),
        exit_status(127, "exec /usr/sbin/iptables-save: no such file or directory"),
    ],
)
def test_program_that_the_image_lacks(frame: bytes) -> None:
    with pytest.raises(NotInImage, match="the image of pod kube-system/proxy-1 has no iptables-save"):
        served(frame, end())


def test_failure_of_the_program_itself_is_no_missing_program() -> None:
    """modprobe words it so, too."""
    frames = (message(STDERR, b"modprobe: No such file or directory"), exit_status(1), end())
    assert served(*frames).exit_code == 1


def test_connection_that_breaks_before_the_end() -> None:
    """Half of an output is no output."""
    with pytest.raises(Unreachable):
        served(message(STDOUT, b"*nat\n"))
    with pytest.raises(Unreachable, match="before the end of iptables-save in container kube-proxy"):
        served(message(STDOUT, b"*nat\n"), end())


def test_output_without_end() -> None:
    with pytest.raises(Failure, match="iptables-save in pod kube-system/proxy-1 wrote more than 0 MiB"):
        served(message(STDOUT, b"x" * 200), status(SUCCESS), end(), max_bytes=100)


@pytest.mark.parametrize(
    ("limits", "problem"),
    [({"seconds": 0.2}, "did not end within 0 s"), ({"silence": 0.2}, "wrote nothing for 0 s")],
)
def test_command_that_hangs(limits: dict[str, float], problem: str) -> None:
    def answer(_: str, connection: socket.socket) -> None:
        accept(connection, server.headers[-1])
        connection.recv(1)  # until the client gives up

    with (
        CannedServer(answer) as server,
        pytest.raises(Failure, match=rf"iptables-save in pod kube-system/proxy-1 {problem}"),
    ):
        run_in_pod(
            plain(server.url),
            AT,
            SAVE,
            seconds=limits.get("seconds", 60.0),
            silence=limits.get("silence", 60.0),
        )


def test_server_without_a_known_protocol() -> None:
    with pytest.raises(Failure, match=r"does not speak v4.channel.k8s.io over WebSocket"):
        served(status(SUCCESS), protocol="channel.k8s.io")


def test_http_proxy_gets_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to an http:// server, whose requests it otherwise forwards."""

    def answer(target: str, connection: socket.socket) -> None:
        assert target == "api.example:8001"
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        request = b""
        while b"\r\n\r\n" not in request:
            request += connection.recv(65536)
        lines = (line.partition(": ") for line in request.decode().split("\r\n")[1:])
        accept(connection, [(name.lower(), value) for name, _, value in lines])
        connection.sendall(message(STDOUT, b"a") + status(SUCCESS) + end())

    with CannedServer(answer) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        assert run_in_pod(plain("http://api.example:8001"), AT, SAVE).output == b"a"
