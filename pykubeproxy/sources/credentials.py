"""The API server's address and credentials: kubeconfig, master URL or service account."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from kubernetes import config
from kubernetes.client.configuration import Configuration

from pykubeproxy.sources.failures import without_password
from pykubeproxy.sources.watch import SourceError


def load(kubeconfig: str, master: str) -> Configuration:
    """Read the files, or run the credential plugin.

    `kubeconfig` is a path, `master` a URL that overrides the kubeconfig's; without both, use the pod's service account.
    Raises SourceError.
    """
    configuration = Configuration()
    # The watch retries: it decides when to list again and what to log.
    configuration.retries = False
    configuration.keep_alive = True
    if kubeconfig:
        _load_kubeconfig(kubeconfig, configuration)
    elif not master:
        _load_service_account(configuration)
    if master:
        configuration.host = master.rstrip("/")
    if not configuration.host.startswith(("http://", "https://")):
        shown = without_password(f"//{configuration.host}").removeprefix("//")
        raise SourceError(f"invalid API server address {shown!r}: use an http:// or https:// URL")
    return configuration


def uses_plugin(kubeconfig: str) -> bool:
    """Return whether a kubeconfig uses a credential plugin, which is slow and reports when its credentials expire."""
    if not kubeconfig:
        return False
    try:
        users = yaml.safe_load(Path(kubeconfig).expanduser().read_bytes())["users"]
        return any("exec" in entry["user"] or "auth-provider" in entry["user"] for entry in users)
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return False


def _load_kubeconfig(path: str, configuration: Configuration) -> None:
    if not Path(path).expanduser().is_file():
        raise SourceError(f"kubeconfig {path} does not exist or is not a file")
    with _logged_errors() as messages:
        try:
            config.load_kube_config(path, client_configuration=configuration, persist_config=False)  # type: ignore[no-untyped-call]
        except Exception as error:
            # The loader does not check the file and raises nearly anything.
            raise SourceError(f"cannot use kubeconfig {path}: {_message(error)}") from None
    if messages:
        raise SourceError(f"kubeconfig {path} gives no credentials: {' '.join(messages[-1].split())}")
    _clean_token(configuration, keep_renewing=uses_plugin(path))


def _load_service_account(configuration: Configuration) -> None:
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        advice = "set --kubeconfig or --master, or run in a pod with a service account"
        # Outside a pod, the loader's message only names environment variables of pods.
        reason = f" ({_message(error)})" if "KUBERNETES_SERVICE_HOST" in os.environ else ""
        raise SourceError(f"no API server configured: {advice}{reason}") from None
    _clean_token(configuration, keep_renewing=False)


def _clean_token(configuration: Configuration, *, keep_renewing: bool) -> None:
    """Strip the token: a token file often ends in a newline, which is illegal in an HTTP header."""
    if not keep_renewing:
        configuration.refresh_api_key_hook = None
    token = configuration.api_key.get("BearerToken")
    if token:
        configuration.api_key["BearerToken"] = token.strip()


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, config.ConfigException | OSError) else f"{type(error).__name__}: {text}"


class _Recorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.messages.append(record.getMessage())


@contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Record logged errors: if a credential plugin fails, the loader logs it and continues without credentials."""
    recorder, root = _Recorder(), logging.getLogger()
    root.addHandler(recorder)
    try:
        yield recorder.messages
    finally:
        root.removeHandler(recorder)
