"""Credentials from a program (`exec` in a kubeconfig) or an identity provider (`auth-provider`)."""

import contextlib
import os
import queue
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from pykubeproxy.sources.watch import SourceError
from pykubeproxy.wording import one_line

_SECONDS = 30.0  # a plugin that takes longer is killed
_MAX_OUTPUT = 1 << 20  # bytes
# Threads that ask an identity provider: nothing ends a request to one that hangs.
_MAX_ASKING = 8
_asking = threading.Semaphore(_MAX_ASKING)
_Answer = TypeVar("_Answer")


class _PluginVariable(msgspec.Struct):
    name: str
    value: str


class CredentialPlugin(msgspec.Struct):
    """The settings under `exec` in a kubeconfig."""

    command: str
    apiVersion: str  # noqa: N815
    args: list[str] | None = None
    env: list[_PluginVariable] | None = None
    provideClusterInfo: bool = False  # noqa: N815


class PluginCredentials(msgspec.Struct):
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
    status: PluginCredentials


def run(plugin: CredentialPlugin, cluster: Mapping[str, Any] | None) -> PluginCredentials:
    """Run a plugin; tell it the cluster if given. Raises SourceError.

    If it takes too long, kill it with its children.
    """
    exit_code, output, errors = _run(plugin, _environment(plugin, cluster))
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


def provider_authorization(provider: Mapping[str, Any]) -> Callable[[], str] | None:
    """Return the function for Credentials that renews the token of an identity provider, None for an unknown provider.

    Raises SourceError.
    """
    # This takes 0.2 s of CPU time and 17 MB.
    from kubernetes.client.configuration import Configuration
    from kubernetes.config.kube_config import KubeConfigLoader

    kubeconfig = {
        "current-context": "current",
        "contexts": [{"name": "current", "context": {"cluster": "current", "user": "current"}}],
        "clusters": [{"name": "current", "cluster": {}}],
        "users": [{"name": "current", "user": {"auth-provider": provider}}],
    }
    configuration = Configuration()

    def header() -> str:
        try:
            token = _in_time(configuration.auth_settings).get("BearerToken")
        except Exception as error:
            # The client raises nearly anything.
            raise SourceError(
                f"cannot renew the token: {type(error).__name__}: {one_line(str(error))}"
            ) from None
        return (token["value"] or "").strip() if token else ""

    try:
        _in_time(lambda: KubeConfigLoader(kubeconfig).load_and_set(configuration))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise SourceError(
            f"cannot get a token by auth-provider: {type(error).__name__}: {one_line(str(error))}"
        ) from None
    return header if "BearerToken" in configuration.api_key else None


def _in_time(ask: Callable[[], _Answer]) -> _Answer:
    """Return the answer of an identity provider. Raises TimeoutError if it takes too long, or what `ask` raises."""
    if not _asking.acquire(blocking=False):
        raise TimeoutError(f"{_MAX_ASKING} earlier requests to the identity provider hang: restart the agent")
    answers: queue.SimpleQueue[_Answer | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)
        finally:
            _asking.release()

    threading.Thread(target=run, name="identity-provider", daemon=True).start()
    try:
        answer = answers.get(timeout=_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"the identity provider did not answer within {_SECONDS:.0f} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _environment(plugin: CredentialPlugin, cluster: Mapping[str, Any] | None) -> dict[str, str]:
    spec: dict[str, Any] = {"interactive": False}
    if cluster is not None:
        spec["cluster"] = cluster
    info = {"apiVersion": plugin.apiVersion, "kind": "ExecCredential", "spec": spec}
    own = {variable.name: variable.value for variable in plugin.env or ()}
    return {**os.environ, **own, "KUBERNETES_EXEC_INFO": msgspec.json.encode(info).decode()}


def _run(plugin: CredentialPlugin, environment: dict[str, str]) -> tuple[int, bytes, str]:
    try:
        process = subprocess.Popen(
            [plugin.command, *(plugin.args or ())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
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
