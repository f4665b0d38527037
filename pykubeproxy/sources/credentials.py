"""Where the API server is and how to prove who asks: kubeconfig, master URL or service account."""

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
    """Read it all anew: the files, or the answer of a credential plugin.

    `kubeconfig` is a path, `master` a URL that wins over the kubeconfig's; without either it is the service account of
    the pod. Raises SourceError.
    """
    configuration = Configuration()
    # Whatever is tried again is tried by the watch, which knows when to list again and what to log.
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
        raise SourceError(f"the API server's address is {shown!r}, not an http:// or https:// URL")
    return configuration


def uses_plugin(kubeconfig: str) -> bool:
    """Whether credentials come from a program or a provider, which is costly to ask and says itself when they end."""
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
    with _overheard() as said:
        try:
            config.load_kube_config(path, client_configuration=configuration, persist_config=False)  # type: ignore[no-untyped-call]
        except Exception as error:
            # The loader trusts the file: a wrong one makes it raise nearly anything.
            raise SourceError(f"kubeconfig {path} cannot be used: {_words(error)}") from None
    if said:
        raise SourceError(f"kubeconfig {path} gives no credentials: {' '.join(said[-1].split())}")
    _settle_token(configuration, keep_renewing=uses_plugin(path))


def _load_service_account(configuration: Configuration) -> None:
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        advice = "give --kubeconfig or --master, or run in a pod with a service account"
        # Outside of a pod the loader's words are about variables that nobody there has heard of.
        why = f" ({_words(error)})" if "KUBERNETES_SERVICE_HOST" in os.environ else ""
        raise SourceError(f"no API server to talk to: {advice}{why}") from None
    _settle_token(configuration, keep_renewing=False)


def _settle_token(configuration: Configuration, *, keep_renewing: bool) -> None:
    """A token file often ends in a newline, which no HTTP header can hold."""
    if not keep_renewing:
        configuration.refresh_api_key_hook = None
    token = configuration.api_key.get("BearerToken")
    if token:
        configuration.api_key["BearerToken"] = token.strip()


def _words(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, config.ConfigException | OSError) else f"{type(error).__name__}: {text}"


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.said.append(record.getMessage())


@contextmanager
def _overheard() -> Iterator[list[str]]:
    """The errors logged meanwhile: the loader only logs that a credential plugin failed, and goes on without."""
    listener, root = _Listener(), logging.getLogger()
    root.addHandler(listener)
    try:
        yield listener.said
    finally:
        root.removeHandler(listener)
