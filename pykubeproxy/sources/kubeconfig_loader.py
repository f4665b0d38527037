"""Load credentials from a kubeconfig with the Python client of Kubernetes."""

import base64
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from kubernetes.config.kube_config import KubeConfigLoader

from pykubeproxy.sources import plugin
from pykubeproxy.sources.credentials import Credentials, ServerConfig
from pykubeproxy.sources.impersonation import impersonation_headers
from pykubeproxy.sources.kubeconfig import KubeconfigCluster, Kubeconfigs, KubeconfigUser, current, effective
from pykubeproxy.sources.kubeconfig_files import read_merged
from pykubeproxy.sources.proxies import proxy_for
from pykubeproxy.sources.watch import SourceError

# Renew credentials of a plugin this many seconds before they expire.
_EARLY = 60.0


def load_kubeconfig(
    kubeconfig: str | Kubeconfigs, master: str, fresh_until: float, with_plugin: bool
) -> Credentials:
    """Read a kubeconfig and the files that it names, and run its credential plugin if `with_plugin` is set.

    `fresh_until` applies to credentials from files. Raises SourceError.
    """
    if isinstance(kubeconfig, str) and not Path(kubeconfig).expanduser().is_file():
        raise SourceError(f"kubeconfig {kubeconfig} does not exist or is not a file")
    configuration = Configuration()
    try:
        content, folder = _read(kubeconfig)
        cluster, user = effective(*current(content), master)
        settings = msgspec.to_builtins(user) | _login(user, folder)
        fresh_until = _replace_plugin(settings, cluster, folder, fresh_until, with_plugin)
        loader = KubeConfigLoader(_single(cluster, settings), config_base_path=str(folder))  # type: ignore[no-untyped-call]
        loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
    except Exception as error:
        # The loader raises nearly anything.
        raise SourceError(f"cannot use kubeconfig {kubeconfig}: {_message(error)}") from None
    return Credentials(
        ServerConfig(
            url=cluster.server,
            proxy=proxy_for(cluster.server, cluster.proxy_url, os.environ),
            verify=configuration.verify_ssl,
            ca_file=configuration.ssl_ca_cert,
            cert_file=configuration.cert_file,
            key_file=configuration.key_file,
            tls_server_name=configuration.tls_server_name,
        ),
        fresh_until,
        _authorization(configuration, renews="auth-provider" in settings),
        impersonation_headers(user),
        not cluster.disable_compression,
    )


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
    user: dict[str, Any], cluster: KubeconfigCluster, folder: Path, fresh_until: float, with_plugin: bool
) -> float:
    """Replace `exec` by the credentials of the plugin; return until when the credentials are fresh.

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
        return fresh_until
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


def _authorization(configuration: Configuration, *, renews: bool) -> Callable[[], str]:
    """Return the function for Credentials; it renews the token of an identity provider if `renews`."""
    if not renews:
        configuration.refresh_api_key_hook = None

    def header() -> str:
        try:
            token = configuration.auth_settings().get("BearerToken")
        except ApiException as error:
            raise SourceError(f"cannot renew the token: {_message(error)}") from None
        # The text of a file often ends in a line break, which is illegal in a header.
        return (token["value"] or "").strip() if token else ""

    return header


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())
    known = isinstance(error, SourceError | ConfigException | OSError)
    return text if known else f"{type(error).__name__}: {text}"
