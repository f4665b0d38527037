"""The API server's address and credentials: kubeconfig, master URL or service account."""

import base64
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import yaml
from kubernetes import config
from kubernetes.client.configuration import Configuration
from kubernetes.config.kube_config import KubeConfigLoader
from urllib3 import HTTPHeaderDict
from urllib3.util import make_headers

from pykubeproxy.sources import plugin
from pykubeproxy.sources.impersonation import impersonation_headers
from pykubeproxy.sources.kubeconfig import KubeconfigCluster, KubeconfigUser, current, effective
from pykubeproxy.sources.kubeconfig_files import Kubeconfigs, read_merged
from pykubeproxy.sources.proxies import proxy_for, user_of
from pykubeproxy.sources.watch import SourceError

# Read credentials from files again after this many seconds: the kubelet renews a token minutes before it expires.
_FRESH = 60.0
# Renew credentials of a plugin this many seconds before they expire.
_EARLY = 60.0
# A request waits this many seconds for a plugin that another request runs; then it runs the plugin itself.
_PATIENCE = 5.0
# Renewals at once: nothing ends the client's own requests to an identity provider.
_MAX_RENEWALS = 8


class Credentials(msgspec.Struct, frozen=True):
    """Credentials and the server they are for. They need renewal after `fresh_until` on the monotonic clock.

    `impersonation` are the headers that name the user to impersonate. `compression` is False if the kubeconfig disables
    compressed responses.
    """

    configuration: Configuration
    fresh_until: float
    impersonation: tuple[tuple[str, str], ...] = ()
    compression: bool = True

    def headers(self) -> HTTPHeaderDict:
        """Return the headers that authenticate a request, if there is a token or user name, and those to impersonate."""
        headers = HTTPHeaderDict(self.impersonation)
        token = self.configuration.auth_settings().get("BearerToken")
        user, password = user_of(str(self.configuration.host))
        if token and token["value"]:
            headers[token["key"]] = token["value"]
        elif user:
            headers.update(make_headers(basic_auth=f"{user}:{password}"))
        return headers


class CredentialStore:
    """Keep credentials and renew them. Any thread may call it. Raises SourceError for unusable settings.

    Construction runs no credential plugin.
    """

    def __init__(self, kubeconfig: str | Kubeconfigs, master: str) -> None:
        self._settings = (kubeconfig, master)
        self.configuration = load(kubeconfig, master, with_plugin=False).configuration
        self._current: Credentials | None = None
        self._renewing = threading.Lock()
        self._renewals = threading.Semaphore(_MAX_RENEWALS)

    def get(self) -> Credentials:
        """Return fresh credentials, which may take as long as a credential plugin. Raises SourceError."""
        if current := self._fresh():
            return current
        alone = self._renewing.acquire(timeout=_PATIENCE)
        try:
            if current := self._fresh():
                return current
            self._current = renewed = self._renew()
            return renewed
        finally:
            if alone:
                self._renewing.release()

    def _renew(self) -> Credentials:
        if not self._renewals.acquire(blocking=False):
            raise SourceError(f"{_MAX_RENEWALS} earlier renewals of the credentials hang: restart the agent")
        try:
            return load(*self._settings)
        finally:
            self._renewals.release()

    def reject(self, credentials: Credentials) -> None:
        """Renew before the next request: the server does not accept these credentials."""
        if self._current is credentials:
            self._current = None

    def _fresh(self) -> Credentials | None:
        current = self._current
        return current if current and time.monotonic() < current.fresh_until else None


def load(kubeconfig: str | Kubeconfigs, master: str, *, with_plugin: bool = True) -> Credentials:
    """Read the files, and run the credential plugin if there is one and `with_plugin` is set.

    `kubeconfig` is a path, or several to merge; `master` is a URL that overrides the kubeconfig's. Without both, use the
    pod's service account. Raises SourceError.
    """
    configuration = Configuration()
    # The watch retries: it decides when to list again and what to log.
    configuration.retries = False
    fresh_until, cluster, user = time.monotonic() + _FRESH, KubeconfigCluster(), KubeconfigUser()
    if kubeconfig:
        fresh_until, cluster, user = _load_kubeconfig(kubeconfig, master, configuration, with_plugin)
    elif master:
        cluster, user = effective(cluster, user, master)
        configuration.host = cluster.server
    else:
        _load_service_account(configuration)
    configuration.proxy = proxy_for(str(configuration.host), cluster.proxy_url, os.environ)
    configuration.no_proxy = None
    return Credentials(
        configuration, fresh_until, impersonation_headers(user), not cluster.disable_compression
    )


def _load_kubeconfig(
    kubeconfig: str | Kubeconfigs, master: str, configuration: Configuration, with_plugin: bool
) -> tuple[float, KubeconfigCluster, KubeconfigUser]:
    """Return until when the credentials are fresh, and what applies to requests."""
    if isinstance(kubeconfig, str) and not Path(kubeconfig).expanduser().is_file():
        raise SourceError(f"kubeconfig {kubeconfig} does not exist or is not a file")
    try:
        content, folder = _read(kubeconfig)
        cluster, user = effective(*current(content), master)
        settings = msgspec.to_builtins(user) | _login(user, folder)
        fresh_until = _replace_plugin(settings, cluster, folder, with_plugin)
        loader = KubeConfigLoader(_single(cluster, settings), config_base_path=str(folder))  # type: ignore[no-untyped-call]
        loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
    except Exception as error:
        # The loader raises nearly anything.
        raise SourceError(f"cannot use kubeconfig {kubeconfig}: {_message(error)}") from None
    _clean_token(configuration, keep_renewing="auth-provider" in settings)
    return fresh_until, cluster, user


def _read(kubeconfig: str | Kubeconfigs) -> tuple[object, Path]:
    """Return a decoded kubeconfig and the folder of its relative paths."""
    if isinstance(kubeconfig, Kubeconfigs):
        return read_merged(kubeconfig), Path.cwd()
    file = Path(kubeconfig).expanduser()
    return yaml.safe_load(file.read_bytes()), file.absolute().parent


def _single(cluster: KubeconfigCluster, user: dict[str, Any]) -> dict[str, Any]:
    """Return a kubeconfig with one cluster and one user."""
    return {
        "current-context": "current",
        "contexts": [{"name": "current", "context": {"cluster": "current", "user": "current"}}],
        "clusters": [{"name": "current", "cluster": msgspec.to_builtins(cluster)}],
        "users": [{"name": "current", "user": user}],
    }


def _login(user: KubeconfigUser, folder: Path) -> dict[str, str]:
    """Return the token of a token file, which wins over a token, or the password, which may be empty."""
    if not user.token_file:
        return {"password": user.password} if user.username else {}
    file = folder / user.token_file
    try:
        if token := file.read_text().strip():
            return {"token": token}
        reason = "it is empty"
    except (OSError, UnicodeDecodeError) as error:
        reason = _message(error)
    if user.token:
        return {}
    raise SourceError(f"cannot read the token in {file}: {reason}")


def _replace_plugin(
    user: dict[str, Any], cluster: KubeconfigCluster, folder: Path, with_plugin: bool
) -> float:
    """Replace `exec` by the credentials of the plugin; return until when they are fresh.

    The client's loader runs a plugin without a time limit.
    """
    settings = user.pop("exec", None)
    if not with_plugin:
        # It may ask an identity provider for a new token.
        user.pop("auth-provider", None)
        return -math.inf
    if "auth-provider" in user:
        return math.inf  # the client renews its token
    if settings is None or "token" in user:
        return time.monotonic() + _FRESH
    try:
        program = msgspec.convert(settings, plugin.Plugin)
    except msgspec.ValidationError as error:
        raise SourceError(f"invalid exec: {error}") from None
    status = plugin.run(program, folder, cluster)
    if status.token:
        user["token"] = status.token
    if status.clientCertificateData and status.clientKeyData:
        user["client-certificate-data"] = _base64(status.clientCertificateData)
        user["client-key-data"] = _base64(status.clientKeyData)
    left = status.seconds_left()
    # Without a date, only a 401 shows that they have expired.
    return math.inf if left is None else time.monotonic() + left - _EARLY


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


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
    known = isinstance(error, SourceError | config.ConfigException | OSError)
    return text if known else f"{type(error).__name__}: {text}"
