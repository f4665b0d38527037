"""Requests that hang: each ends in time, and the outage counts meanwhile."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from pykubeproxy.lab.apiserver import ApiServer
from pykubeproxy.objects import Kind
from pykubeproxy.sources import Client, SourceError, api_watches, plugin
from pykubeproxy.sources.contact import Contact
from pykubeproxy.sources.failures import Failure
from tests.fakes.canned import CHUNKED, Answer, CannedServer
from tests.fakes.cluster import SHORT, certificate, kubeconfig, server, service, watches
from tests.fakes.follower import Follower
from tests.fakes.process import is_running
from tests.fakes.waiting import PATIENCE, eventually

# Longer than any wait of a test.
FOR_EVER = 2 * PATIENCE
PROGRAM = "client.authentication.k8s.io/v1"


def dripping(before: bytes, drip: bytes) -> Answer:
    """Send the same bytes again and again, much faster than any timeout between two of them."""

    def answer(target: str, connection: socket.socket) -> None:
        connection.sendall(before)
        end = time.monotonic() + FOR_EVER
        while time.monotonic() < end:
            connection.sendall(drip)
            time.sleep(0.02)

    return answer


# A server's answer, and what the error says is missing.
HANGS = {
    "header": (dripping(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"), "no response from"),
    "100 Continue": (dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "no response from"),
    "error": (dripping(b"HTTP/1.1 500 Oops\r\nContent-Length: 99999\r\n\r\n", b"x"), "the API server failed"),
    "chunk size": (dripping(CHUNKED + b"5;", b"x"), "no data from"),
    "trailers": (dripping(CHUNKED + b"0\r\n", b"X-More: x\r\n"), "no data from"),
    "silence": (dripping(b"", b""), "no response from"),
    "TLS handshake": (dripping(b"", b""), "no connection to"),
}


def warnings(lines: list[dict[str, Any]]) -> list[str]:
    return [line["reason"] for line in lines if line["log_level"] == "warning"]


@pytest.mark.parametrize("name", HANGS)
def test_a_request_that_hangs_ends_in_time(name: str) -> None:
    """Whatever the server sends instead of a response."""
    answer, missing = HANGS[name]
    with CannedServer(answer) as canned:
        url = canned.url.replace("http:", "https:") if name == "TLS handshake" else canned.url
        started = time.monotonic()
        with pytest.raises(SourceError, match=missing) as caught:
            watches(url, Kind.SERVICE)[0].once()
        assert SHORT.answer <= time.monotonic() - started < SHORT.answer + 2.0
        assert "\n" not in str(caught.value)


def test_a_post_that_hangs_ends_in_time() -> None:
    """The object may exist by then, so a missing body is no failure."""
    for answer, fails in ((HANGS["header"][0], True), (HANGS["chunk size"][0], False)):
        with CannedServer(answer) as canned:
            started = time.monotonic()
            try:
                assert Client(master=canned.url).post("/x", {"a": 1}, resource="events", idle=0.5) == b""
                assert not fails
            except Failure as failure:
                assert fails, failure
            assert time.monotonic() - started >= 0.5


def test_the_outage_grows_while_a_request_hangs() -> None:
    """Before the request fails, so that metrics and alerts show it; and it ends with the first event."""
    patient = msgspec.structs.replace(SHORT, answer=30.0)
    with server() as api:
        api.faults.hang(verb="list")
        client = Client(master=api.url, contact=Contact(limit=1.0))
        watch, *_ = api_watches(client, "n1", patient)
        with capture_logs() as lines, Follower([watch]) as follower:
            assert watch.outage is None
            eventually(lambda: watch.outage)
            assert watch.outage
            assert watch.outage.seconds >= 1.0
            assert watch.outage.reason == "the API server sends nothing"
            assert not warnings(lines)
            api.faults.release()
            follower.sees()
            eventually(lambda: not watch.outage)


@pytest.fixture
def hanging_plugin(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Write a kubeconfig whose plugin hangs, with a child, while the file `hang` exists."""
    program = tmp_path / "plugin"
    answer = f'{{"apiVersion": "{PROGRAM}", "kind": "ExecCredential", "status": {{"token": "right"}}}}'
    program.write_text(
        f"#!/bin/sh\nif [ -e {tmp_path}/hang ]; then sleep {FOR_EVER:.0f} & echo $! >>{tmp_path}/children\n"
        f"wait\nfi\necho '{answer}'\n"
    )
    program.chmod(0o700)

    def write(api: ApiServer) -> Path:
        plugin = {"command": str(program), "apiVersion": PROGRAM}
        return kubeconfig(api, tmp_path / "kubeconfig", user={"exec": plugin})

    yield write
    children = tmp_path / "children"
    for pid in children.read_text().split() if children.exists() else ():
        # It was killed with the plugin, and may take a moment to end.
        eventually(lambda pid=int(pid): not is_running(pid))  # type: ignore[misc]


def test_a_plugin_that_hangs_is_killed_with_its_children(
    hanging_plugin: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The construction of a client does not run it, and the error names it."""
    monkeypatch.setattr(plugin, "_SECONDS", 0.7)
    (tmp_path / "hang").touch()
    with server(tls=certificate(tmp_path), token="right") as api:
        client = Client(str(hanging_plugin(api)))
        (watch, *_) = api_watches(client, "n1", SHORT)
        with pytest.raises(SourceError, match=r"plugin .*/plugin did not end within 1 s and was killed"):
            watch.once()
        (child,) = (tmp_path / "children").read_text().split()
        eventually(lambda: not is_running(int(child)))
        (tmp_path / "hang").unlink()
        watch.once()


def test_watches_go_on_while_a_plugin_hangs(
    hanging_plugin: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their credentials were accepted; only the new request waits."""
    with server(tls=certificate(tmp_path), token="right") as api:
        client = Client(str(hanging_plugin(api)), qps=-1)
        first, second, _ = api_watches(client, "n1", SHORT)
        with Follower([first]) as follower:
            follower.sees()
            api.requests.wait(1, "watch")
            client._credentials.reject(client._credentials.get())
            (tmp_path / "hang").touch()
            monkeypatch.setattr(plugin, "_SECONDS", 2.0)

            def wait() -> None:
                with pytest.raises(SourceError, match="did not end within 2 s"):
                    second.once()

            waiting = threading.Thread(target=wait)
            waiting.start()
            eventually((tmp_path / "children").exists)
            api.store.create(service("a"))
            follower.sees("a")
            assert waiting.is_alive()
            waiting.join()


def test_a_plugin_that_prints_without_end_is_stopped() -> None:
    """Before memory is exhausted."""
    settings = plugin.CredentialPlugin("yes", PROGRAM)
    with pytest.raises(SourceError, match="credential plugin yes printed more than 1048576 bytes"):
        plugin.run(settings, None)
