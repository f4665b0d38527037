"""Pods of an API server: list, read, create and delete them, and run commands in them, over WebSocket.

Only commands for other nodes import this module; the agent reads no pods.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import quote, urlencode

import msgspec
import websocket
from urllib3 import HTTPHeaderDict

from pykubeproxy.objects.pods import Pod, decode_pod
from pykubeproxy.sources import failures
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import (
    ApiStatus,
    Failure,
    Forbidden,
    NotFound,
    ResponseTimeout,
    TooSlow,
    Unreachable,
)
from pykubeproxy.sources.queries import list_items
from pykubeproxy.sources.transport import LimitedSocket

_REQUEST_SECONDS = 60.0  # for a request
# The newest first; kubelets since 1.30 know version 5.
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
# The first byte of each message.
_STDOUT, _STDERR, _STATUS = 1, 2, 3
_MAX_ERRORS = 1 << 16  # bytes of standard error and of the status
_COMMAND_SECONDS = 60.0
_MAX_OUTPUT = 128 << 20  # bytes
# How container runtimes report a missing program. Programs print the second one, too.
_NOT_FOUND, _NO_FILE = "executable file not found", "no such file or directory"


def list_pods(
    client: Client,
    namespace: str = "",
    *,
    labels: str = "",
    name: str = "",
    node: str = "",
    address: str = "",
) -> tuple[Pod, ...]:
    """Return the Pods of a namespace, or of all; skip unreadable ones. Raises Failure.

    `labels` is a label selector; `name`, `node` and the primary IP `address` must match if given.
    """
    fields = {"metadata.name": name, "spec.nodeName": node, "status.podIP": address}
    field_selector = ",".join(f"{field}={value}" for field, value in fields.items() if value)
    selectors = {"labelSelector": labels, "fieldSelector": field_selector}
    given = {key: value for key, value in selectors.items() if value}
    return list_items(client, _path(namespace), "Pod", given, decode_pod)


def get_pod(client: Client, namespace: str, name: str) -> Pod:
    """Return a Pod. Raises Failure."""
    end = time.monotonic() + _REQUEST_SECONDS
    with client.stream(
        _path(namespace, name), {}, resource=f"pod {name}", verbs="get of", idle=_REQUEST_SECONDS, end=end
    ) as body:
        return _decoded(b"".join(body))


def create_pod(client: Client, namespace: str, manifest: Mapping[str, object]) -> Pod:
    """Create a Pod and return it. Raises Failure."""
    return _decoded(client.post(_path(namespace), manifest, resource="pods", idle=_REQUEST_SECONDS))


def delete_pod(client: Client, namespace: str, name: str) -> None:
    """Delete a Pod at once. Raises Failure."""
    client.delete(
        _path(namespace, name), {"gracePeriodSeconds": 0}, resource=f"pod {name}", idle=_REQUEST_SECONDS
    )


def _decoded(text: bytes) -> Pod:
    try:
        return decode_pod(text)
    except ValueError as error:
        raise Failure(f"the API server sent an invalid pod: {error}") from None


def _path(namespace: str, name: str = "") -> str:
    inside = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"/api/v1{inside}/pods" + (f"/{quote(name, safe='')}" if name else "")


class ContainerRef(NamedTuple):
    """Names a container of a pod, in which commands can run."""

    namespace: str
    pod: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod}"


class CommandTimedOut(Failure):
    """A command wrote nothing for too long, or did not end in time."""


class NotInImage(Failure):
    """The container's image has no such program."""


class CommandOutput(NamedTuple):
    """What a command wrote, at most 64 KiB of it to standard error, and how it ended."""

    output: bytes
    errors: str
    exit_code: int


def run_in_pod(
    client: Client,
    container: ContainerRef,
    command: Sequence[str],
    *,
    write: Callable[[bytes], object] | None = None,
    seconds: float = _COMMAND_SECONDS,
    silence: float = _COMMAND_SECONDS,
    max_bytes: int = _MAX_OUTPUT,
) -> CommandOutput:
    """Run a command; pass its output to `write` piece by piece, or return it without that.

    The command has `seconds` to end, may write nothing for `silence` seconds, and may write `max_bytes`. Raises Failure,
    among them CommandTimedOut, NotInImage, Forbidden and NotFound.
    """
    output, errors, status, size = bytearray(), bytearray(), bytearray(), 0
    write = write or output.extend
    end, silence = time.monotonic() + seconds, min(silence, seconds)
    with client.connection(partial(_messages, container, command), idle=silence, end=end) as messages:
        try:
            for message in messages:
                channel, content = message[0], message[1:]
                if channel == _STDOUT:
                    size += len(content)
                    if size > max_bytes:
                        raise Failure(
                            f"{command[0]} in pod {container} wrote more than {max_bytes >> 20} MiB"
                        )
                    write(content)
                elif channel in (_STDERR, _STATUS):
                    kept = errors if channel == _STDERR else status
                    kept += content[: _MAX_ERRORS - len(kept)]
        except ResponseTimeout:
            problem = f"wrote nothing for {silence:.0f} s"
            raise CommandTimedOut(f"{command[0]} in pod {container} {problem}") from None
        except TooSlow:
            problem = f"did not end within {seconds:.0f} s"
            raise CommandTimedOut(f"{command[0]} in pod {container} {problem}") from None
        except Failure:
            if not status:
                raise
    text = errors.decode(errors="replace")
    return CommandOutput(bytes(output), text, _exit_code(container, command, bytes(status), text))


def _messages(
    container: ContainerRef,
    command: Sequence[str],
    connection: LimitedSocket,
    server: str,
    headers: HTTPHeaderDict,
) -> Generator[bytes, None, None]:
    """Yield an empty part when the server has accepted the command, then its messages until it closes."""
    query = [("container", container.name), ("stdout", "true"), ("stderr", "true")]
    path = f"/api/v1/namespaces/{quote(container.namespace)}/pods/{quote(container.pod)}/exec"
    url = f"{server}{path}?{urlencode([*(('command', word) for word in command), *query])}"
    channel = websocket.WebSocket(skip_utf8_validation=True)
    try:
        channel.connect(  # type: ignore[no-untyped-call]
            url.replace("http", "ws", 1),
            socket=connection,
            header=[f"{name}: {value}" for name, value in headers.iteritems()],
            subprotocols=list(_PROTOCOLS),
            suppress_origin=True,
            redirect_limit=0,
        )
        if channel.getsubprotocol() not in _PROTOCOLS:
            raise websocket.WebSocketProtocolException("no subprotocol")
        yield b""
        while True:
            kind, data = channel.recv_data()
            if kind == websocket.ABNF.OPCODE_CLOSE:
                return
            message = data.encode() if isinstance(data, str) else bytes(data)
            if len(message) > 1:
                yield message
    except websocket.WebSocketBadStatusException as error:
        raise _refused(container, error) from None
    except websocket.WebSocketConnectionClosedException:
        raise Unreachable(f"the connection to {server} broke") from None
    except websocket.WebSocketException as error:
        raise Failure(
            f"{server} does not speak {_PROTOCOLS[-1]} over WebSocket ({error}); check that each proxy on the way passes WebSockets"
        ) from None


def _refused(container: ContainerRef, error: websocket.WebSocketBadStatusException) -> Failure:
    message = failures.status_message(error.resp_body or b"")
    detail = f" ({error.status_code}: {message})" if message else f" ({error.status_code})"
    match error.status_code:
        case 403:
            return Forbidden(
                f"exec into pod {container} is not permitted{detail}: a role must grant get and create of pods/exec,"
                " as manifests/inspect/rbac.yaml does"
            )
        case 404:
            return NotFound(f"pod {container} does not exist{detail}")
        case 400:
            return Failure(f"cannot exec into container {container.name} of pod {container}{detail}")
        case 500 | 502:
            return Failure(f"the API server cannot reach the kubelet of pod {container}{detail}")
    return failures.from_status(error.status_code, message, 0.0, "pods/exec", "get and create of")


def _exit_code(container: ContainerRef, command: Sequence[str], status: bytes, errors: str) -> int:
    """Return the exit code in a Status. Raises Failure if the command did not run to its end."""
    where = f"{command[0]} in container {container.name} of pod {container}"
    if not status:
        raise Unreachable(f"the connection broke before the end of {where}")
    try:
        end = msgspec.json.decode(status, type=ApiStatus)
    except (ValueError, RecursionError):
        raise Failure(f"the API server sent an invalid status for {where}") from None
    if end.status == "Success":
        return 0
    causes = (end.details.causes if end.details else None) or []
    codes = (cause.message for cause in causes if cause.reason == "ExitCode")
    code = next((code for code in codes if code.isdecimal()), "")
    said = f"{end.message or ''} {errors}".lower()
    if _NOT_FOUND in said or (_NO_FILE in said and code in ("", "126", "127", "128")):
        raise NotInImage(f"the image of pod {container} has no {command[0]}")
    if not code:
        raise Failure(f"cannot run {where}: {end.message or end.reason or 'no reason given'}")
    return int(code)
