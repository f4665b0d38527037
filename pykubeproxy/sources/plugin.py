"""Run a credential plugin: the program under `exec` in a kubeconfig."""

import base64
import contextlib
import os
import selectors
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from pykubeproxy.sources.kubeconfig import KubeconfigCluster
from pykubeproxy.sources.watch import SourceError
from pykubeproxy.wording import one_line

_SECONDS = 30.0  # a plugin that takes longer is killed
_MAX_OUTPUT = 1 << 20  # bytes


class _Variable(msgspec.Struct):
    name: str
    value: str


class Plugin(msgspec.Struct):
    """The settings under `exec` in a kubeconfig."""

    command: str
    apiVersion: str  # noqa: N815
    args: list[str] | None = None
    env: list[_Variable] | None = None
    provideClusterInfo: bool = False  # noqa: N815


class Status(msgspec.Struct):
    """The credentials that a plugin returns: a token, or a client certificate and its key in PEM."""

    token: str | None = None
    clientCertificateData: str | None = None  # noqa: N815
    clientKeyData: str | None = None  # noqa: N815
    expirationTimestamp: datetime | None = None  # noqa: N815

    def seconds_left(self) -> float | None:
        """Return the seconds until the credentials expire, None if they do not."""
        if self.expirationTimestamp is None:
            return None
        end = self.expirationTimestamp
        return ((end if end.tzinfo else end.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()


class _ExecCredential(msgspec.Struct):
    apiVersion: str  # noqa: N815
    kind: str
    status: Status


def run(plugin: Plugin, folder: Path, cluster: KubeconfigCluster) -> Status:
    """Run a plugin in the folder of its kubeconfig. Kill it with its children if it takes too long. Raises SourceError."""
    exit_code, output, errors = _run(plugin, folder, _environment(plugin, folder, cluster))
    if exit_code:
        detail = f": {one_line(errors)}" if errors.strip() else ""
        raise SourceError(f"credential plugin {plugin.command} exited with status {exit_code}{detail}")
    try:
        credential = msgspec.json.decode(output, type=_ExecCredential)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"credential plugin {plugin.command} printed no ExecCredential: {error}") from None
    if (credential.kind, credential.apiVersion) != ("ExecCredential", plugin.apiVersion):
        printed = one_line(f"{credential.apiVersion} {credential.kind}")
        raise SourceError(
            f"credential plugin {plugin.command} printed {printed}, not {plugin.apiVersion} ExecCredential"
        )
    status = credential.status
    if not status.token and not (status.clientCertificateData and status.clientKeyData):
        raise SourceError(
            f"credential plugin {plugin.command} printed neither a token nor a client certificate with its key"
        )
    return status


def _environment(plugin: Plugin, folder: Path, cluster: KubeconfigCluster) -> dict[str, str]:
    spec: dict[str, Any] = {"interactive": False}
    if plugin.provideClusterInfo:
        spec["cluster"] = _cluster_info(cluster, folder)
    info = {"apiVersion": plugin.apiVersion, "kind": "ExecCredential", "spec": spec}
    own = {variable.name: variable.value for variable in plugin.env or ()}
    return {**os.environ, **own, "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode()}


def _cluster_info(cluster: KubeconfigCluster, folder: Path) -> dict[str, Any]:
    """Return the cluster in the form of the ExecCredential API: with the contents of files, not their paths."""
    info: dict[str, Any] = msgspec.to_builtins(cluster)
    if authority := info.pop("certificate-authority", ""):
        try:
            content = (folder / authority).read_bytes()
        except OSError as error:
            raise SourceError(f"cannot read the certificate authority: {error}") from None
        info["certificate-authority-data"] = base64.b64encode(content).decode()
    for extension in info.pop("extensions", ()):
        if extension.get("name") == "client.authentication.k8s.io/exec":
            info["config"] = extension.get("extension")
    return info


def _run(plugin: Plugin, folder: Path, environment: dict[str, str]) -> tuple[int, bytes, str]:
    """Return the exit code, the output and the errors of the program."""
    try:
        process = subprocess.Popen(
            [plugin.command, *(plugin.args or ())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            process_group=0,  # a group of its own, so that it can be killed with all that it started
        )
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot run credential plugin {plugin.command}: {error}") from None
    try:
        output, errors = _read(process, time.monotonic() + _SECONDS)
        return process.wait(_SECONDS), output, errors.decode(errors="replace")
    except (TimeoutError, subprocess.TimeoutExpired):
        raise SourceError(
            f"credential plugin {plugin.command} did not end within {_SECONDS:.0f} s and was killed; "
            "run it by hand to see why"
        ) from None
    except ValueError as error:
        raise SourceError(f"credential plugin {plugin.command} {error}") from None
    finally:
        _end(process)


def _read(process: subprocess.Popen[bytes], end: float) -> tuple[bytes, bytes]:
    """Read both outputs until the program and its children close them. Raises TimeoutError, and ValueError for too much."""
    assert process.stdout and process.stderr
    texts = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for pipe in texts:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                texts[key.fileobj] += data  # type: ignore[index]
                if len(texts[key.fileobj]) > _MAX_OUTPUT:  # type: ignore[index]
                    raise ValueError(f"printed more than {_MAX_OUTPUT} bytes")
                if not data:
                    selector.unregister(key.fileobj)
    return bytes(texts[process.stdout]), bytes(texts[process.stderr])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and its children unless it has ended, and close the pipes to it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A program that hangs in the kernel does not end; do not wait for it.
            process.wait(timeout=1)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
