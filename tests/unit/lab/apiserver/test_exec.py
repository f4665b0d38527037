"""Commands in pods, over a WebSocket: their streams, their exit codes, refusals, and what ends them."""

import contextlib
import json
import os
import select
import socket
import ssl
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket

from pykubeproxy.lab.apiserver import ApiServer, Sandbox
from pykubeproxy.lab.apiserver.resources import PODS as PODS_RESOURCE
from tests.fakes.cluster import certificate
from tests.fakes.faulty_apiserver import FaultyApiServer
from tests.fakes.waiting import PATIENCE
from tests.unit.lab.apiserver.conftest import Client, Maker

V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
PODS = "/api/v1/namespaces/default/pods"
EXIT_3 = {
    "metadata": {},
    "status": "Failure",
    "message": "command terminated with non-zero exit code: exit status 3",
    "reason": "NonZeroExitCode",
    "details": {"causes": [{"reason": "ExitCode", "message": "3"}]},
}


@pytest.fixture
def server(node: Maker, pod: Maker) -> Iterator[FaultyApiServer]:
    with FaultyApiServer(runtime=lambda _: Sandbox()) as running:
        running.store.create(node("n1"))
        running.store.create(pod("one"))
        running.store.create(pod("two", containers=[{"name": name, "image": "x"} for name in ("a", "b")]))
        running.store.create(pod("unscheduled", nodeName=None))
        running.store.create(pod("pending", status={"phase": "Pending"}))
        yield running


@pytest.fixture
def execute(server: FaultyApiServer) -> Iterator[Callable[..., Any]]:
    """Opens an exec of a shell script; yields the WebSocket."""
    opened = contextlib.ExitStack()

    def start(
        script: str,
        streams: str = "stdout&stderr",
        protocol: str = V5,
        server: FaultyApiServer = server,
        **options: Any,
    ) -> Any:
        query = "&".join(f"{stream}=true" for stream in streams.split("&"))
        url = server.url.replace("http", "ws", 1)
        command = f"command=sh&command=-c&command={script}".replace(" ", "%20").replace(";", "%3B")
        connection = websocket.create_connection(
            f"{url}{PODS}/one/exec?{command}&{query}", subprotocols=[protocol], timeout=PATIENCE, **options
        )
        return opened.enter_context(contextlib.closing(connection))

    with opened:
        yield start


def channels(connection: Any) -> Any:
    """Everything the server sends until it closes, by channel; the error channel as JSON."""
    received: dict[int, bytes] = {}
    while True:
        opcode, data = connection.recv_data()
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            break
        received[data[0]] = received.get(data[0], b"") + data[1:]
    return {**received, 3: json.loads(received[3])}


@pytest.mark.parametrize("protocol", [V5, V4])
def test_output_and_exit_code_come_on_their_channels(execute: Callable[..., Any], protocol: str) -> None:
    connection = execute("echo out; echo err >%262; exit 3", protocol=protocol)
    assert connection.subprotocol == protocol
    assert channels(connection) == {1: b"out\n", 2: b"err\n", 3: EXIT_3}


def test_success_and_only_the_requested_stream(execute: Callable[..., Any]) -> None:
    received = channels(execute("echo out; echo err >%262", streams="stderr"))
    assert received == {2: b"err\n", 3: {"metadata": {}, "status": "Success"}}


def test_a_signal_counts_as_a_shell_counts_it(execute: Callable[..., Any]) -> None:
    status = channels(execute("kill -9 $$"))[3]
    assert status["details"]["causes"][0]["message"] == "137"


def test_closing_stdin_ends_it(execute: Callable[..., Any]) -> None:
    """With v5 a client closes the channel, and the process reads all that came before."""
    connection = execute("wc -c", streams="stdin&stdout")
    for _ in range(40):
        connection.send_binary(b"\0" + b"x" * 10_000)
    connection.send_binary(b"\xff\0")
    assert channels(connection)[1].strip() == b"400000"


def test_text_messages_are_input_too(execute: Callable[..., Any]) -> None:
    """The Python client sends text."""
    connection = execute("read line; echo got $line", streams="stdin&stdout", protocol=V4)
    connection.send("\0ä\n")
    assert channels(connection)[1].decode() == "got ä\n"


def test_input_for_a_process_that_reads_none_is_dropped(execute: Callable[..., Any]) -> None:
    connection = execute("exec <%26-; echo done", streams="stdin&stdout")
    connection.send_binary(b"\0" + b"x" * 1_000_000)
    assert channels(connection)[1] == b"done\n"


def test_pings_are_answered(execute: Callable[..., Any]) -> None:
    connection = execute("read line", streams="stdin&stdout")
    connection.ping("here")
    opcodes = [
        connection.recv_data(control_frame=True)[0] for _ in range(2)
    ]  # after the first, empty message
    assert websocket.ABNF.OPCODE_PONG in opcodes


def test_a_missing_program_is_an_internal_error(client: Client, execute: Callable[..., Any]) -> None:
    url = client.server.url.replace("http", "ws", 1)
    connection = websocket.create_connection(
        f"{url}{PODS}/one/exec?command=nothere&stdout=1", subprotocols=[V5], timeout=PATIENCE
    )
    status = channels(connection)[3]
    assert (status["reason"], status["code"]) == ("InternalError", 500)
    assert 'exec: "nothere": executable file not found in $PATH' in status["message"]


def test_output_is_not_read_ahead_of_a_slow_client(execute: Callable[..., Any]) -> None:
    """The server never holds more than a little of it, and loses nothing."""
    size, small = 12_000_000, (socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection = execute(f"head -c {size} /dev/zero", sockopt=[small])
    tracemalloc.start()
    received = 0
    while received < size:
        received += len(connection.sock.recv(8192))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_500_000


@pytest.mark.parametrize("script", ["echo $$; exec sleep 1000", "echo $$; exec sleep 1000 >%26- 2>%26-"])
def test_a_client_that_leaves_ends_the_process(execute: Callable[..., Any], script: str) -> None:
    """Also if the process has closed its output."""
    connection = execute(script)
    pid = b""
    while not pid:
        pid = connection.recv()[1:].strip()
    process = os.pidfd_open(int(pid))
    connection.shutdown()
    assert select.select([process], [], [], 10)[0]
    os.close(process)


@pytest.mark.parametrize("script", ["echo $$; sleep 60", "echo $$; exec >%26-; sleep 60"])
def test_the_end_of_the_pod_ends_the_process(
    server: FaultyApiServer, execute: Callable[..., Any], script: str
) -> None:
    """Changes of this pod and of others do not."""
    connection = execute(script)
    received = b""
    while not received:
        received = connection.recv()[1:].strip()
    process = os.pidfd_open(int(received))
    server.store.merge_patch(PODS_RESOURCE, "default", "one", {"metadata": {"labels": {"a": "b"}}})
    server.store.delete(PODS_RESOURCE, "default", "two", grace=0)
    connection.ping("here")
    while connection.recv_data(control_frame=True)[0] != websocket.ABNF.OPCODE_PONG:
        pass
    assert select.select([process], [], [], 0)[0] == []
    server.store.delete(PODS_RESOURCE, "default", "one", grace=0)
    assert channels(connection)[3]["details"]["causes"][0]["message"] == "137"
    assert select.select([process], [], [], 10)[0]
    os.close(process)


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("missing/exec?command=id&stdout=1", 404, 'pods "missing" not found'),
        ("one/exec?stdout=1", 400, "at least one command"),
        ("one/exec?command=id", 400, "you must specify at least 1 of stdin, stdout, stderr"),
        ("one/exec?command=id&stdout=1&tty=1", 400, "no terminals"),
        ("one/exec?command=id&stdout=1&container=x", 400, "container x is not valid for pod one"),
        (
            "two/exec?command=id&stdout=1",
            400,
            "a container name must be specified for pod two, choose one of: [a b]",
        ),
        ("unscheduled/exec?command=id&stdout=1", 400, "pod unscheduled does not have a host assigned"),
        ("pending/exec?command=id&stdout=1", 500, 'container not found ("main")'),
    ],
)
def test_refusals(server: FaultyApiServer, path: str, code: int, message: str) -> None:
    """They are Status objects, sent instead of the upgrade."""
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        websocket.create_connection(
            server.url.replace("http", "ws", 1) + f"{PODS}/{path}", subprotocols=[V5], timeout=PATIENCE
        )
    status = json.loads(refused.value.resp_body or b"")
    assert (refused.value.status_code, status["kind"], status["code"]) == (code, "Status", code)
    assert message in status["message"]


@pytest.mark.parametrize(
    ("method", "headers", "code", "message"),
    [
        ("GET", {}, 400, "Upgrade request required"),
        ("POST", {}, 400, "Upgrade request required"),
        ("POST", {"Connection": "Upgrade", "Upgrade": "SPDY/3.1"}, 400, "over WebSocket, not SPDY/3.1"),
        ("GET", {"Connection": "Upgrade", "Upgrade": "websocket"}, 400, "Sec-WebSocket-Version"),
        (
            "GET",
            {
                "Connection": "keep-alive, Upgrade",
                "Upgrade": "websocket",
                "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==",
                "Sec-WebSocket-Protocol": "channel.k8s.io, other",
            },
            403,
            "channel.k8s.io, other",
        ),
        ("DELETE", {}, 405, "does not allow this method"),
    ],
)
def test_other_handshakes_are_refused(
    client: Client, method: str, headers: Any, code: int, message: str
) -> None:
    answer = client.ask(method, f"{PODS}/one/exec?command=id&stdout=1", **headers)
    assert (answer.status, message in answer.json["message"]) == (code, True), answer.text


def test_without_nodes_there_is_no_exec(client_of: Callable[[ApiServer], Client], pod: Maker) -> None:
    with ApiServer() as server:
        server.store.create(pod("one"))
        headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        more = {"Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==", "Sec-WebSocket-Protocol": V5}
        answer = client_of(server).ask("GET", f"{PODS}/one/exec?command=id&stdout=1", **headers, **more)
    assert (answer.status, "dialing backend" in answer.json["message"]) == (500, True)


def test_exec_over_tls(execute: Callable[..., Any], node: Maker, pod: Maker, tmp_path: Path) -> None:
    made, key = certificate(tmp_path)
    with ApiServer(tls=(made, key), runtime=lambda _: Sandbox()) as secure:
        secure.store.create(node("n1"))
        secure.store.create(pod("one"))
        context = ssl.create_default_context(cafile=str(made))
        connection = execute("wc -c", "stdin&stdout", server=secure, sslopt={"context": context})
        connection.send_binary(b"\0" + b"x" * 300_000)
        connection.send_binary(b"\xff\0")
        assert channels(connection)[1].strip() == b"300000"


def test_exec_may_be_forbidden(server: FaultyApiServer, execute: Callable[..., Any]) -> None:
    """As by RBAC, which the server does not simulate."""
    server.faults.fail(403, path="/exec")
    with pytest.raises(websocket.WebSocketBadStatusException) as refused:
        execute("id")
    assert json.loads(refused.value.resp_body or b"")["reason"] == "Forbidden"
    assert channels(execute("echo again"))[1] == b"again\n"


def test_exec_may_break_off_in_its_output(server: FaultyApiServer, execute: Callable[..., Any]) -> None:
    """The client gets a part of the output and no status."""
    server.faults.truncate(path="/exec")
    connection = execute("seq 1000")
    with pytest.raises(websocket.WebSocketConnectionClosedException):
        channels(connection)
    assert channels(execute("echo again"))[1] == b"again\n"


def test_exec_may_stall_in_its_output(server: FaultyApiServer, execute: Callable[..., Any]) -> None:
    """Nothing more comes until it is released, and then all of it."""
    server.faults.stall(times=1)
    stalled, other = execute("seq 1000"), execute("echo other")
    assert stalled.recv() == b"\1"  # the start
    assert channels(other)[1] == b"other\n"
    server.faults.release()
    assert len(channels(stalled)[1].split()) == 1000
