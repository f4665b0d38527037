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

from pykubeproxy.sources import plugin
from pykubeproxy.sources.watch import SourceError
from pykubeproxy.wording import without_password

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

    `compression` is False if the kubeconfig disables compressed responses.
    """

    configuration: Configuration
    fresh_until: float
    compression: bool = True

    def headers(self) -> dict[str, str]:
        """Return the header that authenticates a request; none with a client certificate."""
        token = self.configuration.auth_settings().get("BearerToken")
        return {token["key"]: token["value"]} if token and token["value"] else {}


class CredentialStore:
    """Keep credentials and renew them. Any thread may call it. Raises SourceError for unusable settings.

    Construction runs no credential plugin.
    """

    def __init__(self, kubeconfig: str, master: str) -> None:
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


def load(kubeconfig: str, master: str, *, with_plugin: bool = True) -> Credentials:
    """Read the files, and run the credential plugin if there is one and `with_plugin` is set.

    `kubeconfig` is a path, `master` a URL that overrides the kubeconfig's; without both, use the pod's service account.
    Raises SourceError.
    """
    configuration = Configuration()
    # The watch retries: it decides when to list again and what to log.
    configuration.retries = False
    fresh_until, compression = time.monotonic() + _FRESH, True
    if kubeconfig:
        fresh_until, compression = _load_kubeconfig(kubeconfig, configuration, with_plugin)
    elif not master:
        _load_service_account(configuration)
    if master:
        configuration.host = master.rstrip("/")
    if not configuration.host.startswith(("http://", "https://")):
        shown = without_password(f"//{configuration.host}").removeprefix("//")
        raise SourceError(f"invalid API server address {shown!r}: use an http:// or https:// URL")
    return Credentials(configuration, fresh_until, compression)


def _load_kubeconfig(path: str, configuration: Configuration, with_plugin: bool) -> tuple[float, bool]:
    """Return until when the credentials are fresh, and whether the server may compress responses."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise SourceError(f"kubeconfig {path} does not exist or is not a file")
    try:
        content = yaml.safe_load(file.read_bytes())
        cluster, user = _current(content)
        compression = _may_compress(cluster)
        fresh_until = _replace_plugin(user, cluster, file.absolute().parent, with_plugin)
        loader = KubeConfigLoader(config_dict=content, config_base_path=str(file.absolute().parent))  # type: ignore[no-untyped-call]
        loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
    except SourceError as error:
        raise SourceError(f"kubeconfig {path} gives no credentials: {error}") from None
    except Exception as error:
        # The loader does not check the file and raises nearly anything.
        raise SourceError(f"cannot use kubeconfig {path}: {_message(error)}") from None
    _clean_token(configuration, keep_renewing="auth-provider" in user)
    return fresh_until, compression


def _current(content: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return cluster and user of the current context, empty if they are missing: the loader has the better messages."""
    if not isinstance(content, dict):
        raise config.ConfigException("it is empty or not a mapping")
    context = _named(content.get("contexts"), content.get("current-context"), "context")
    cluster = _named(content.get("clusters"), context.get("cluster"), "cluster")
    return cluster, _named(content.get("users"), context.get("user"), "user")


def _named(entries: Any, name: Any, kind: str) -> dict[str, Any]:
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(kind), dict):
            named: dict[str, Any] = entry[kind]
            return named
    return {}


def _may_compress(cluster: dict[str, Any]) -> bool:
    disabled = cluster.get("disable-compression")
    if not isinstance(disabled, bool | None):
        raise config.ConfigException("invalid disable-compression: use true or false")
    return not disabled


def _replace_plugin(user: dict[str, Any], cluster: dict[str, Any], folder: Path, with_plugin: bool) -> float:
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
    if settings is None or "token" in user or "tokenFile" in user:
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
    return text if isinstance(error, config.ConfigException | OSError) else f"{type(error).__name__}: {text}"
