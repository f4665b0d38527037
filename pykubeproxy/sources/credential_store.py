"""The current credentials: from a kubeconfig, the master URL or a pod's service account, renewed in time."""

import os
import threading
import time
from pathlib import Path

from pykubeproxy.sources.credentials import Credentials, Kubeconfigs, ServerConfig, server_url
from pykubeproxy.sources.proxies import proxy_for
from pykubeproxy.sources.watch import SourceError

_POD_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NO_SERVER = "set --kubeconfig or --master, or run in a pod with a service account"
_NO_ACCOUNT = "let the kubelet mount it (automountServiceAccountToken), or set --kubeconfig or --master"
# Read credentials from files again after this many seconds: the kubelet renews a token minutes before it expires.
_FRESH = 60.0
# A request waits this many seconds for a plugin that another request runs; then it runs the plugin itself.
_PATIENCE = 5.0


def _pod_credentials(fresh_until: float) -> Credentials:
    """Return the service account of this pod, as client-go reads it. Its token expires after some time."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise SourceError(f"no API server configured: {_NO_SERVER}")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if not port:
        raise SourceError(f"no API server configured: KUBERNETES_SERVICE_PORT is not set; {_NO_SERVER}")
    url = server_url(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", tls=True)
    ca_file = _POD_FOLDER / "ca.crt"
    _pod_file(ca_file)
    file = _POD_FOLDER / "token"
    try:
        # A line break at its end is illegal in a header.
        header = f"Bearer {_pod_file(file).decode().strip()}"
    except UnicodeDecodeError:
        raise _unreadable(file, "it is not text") from None
    server = ServerConfig(url, proxy_for(url, "", os.environ), ca_file=str(ca_file))
    return Credentials(server, fresh_until, lambda: header)


def _pod_file(file: Path) -> bytes:
    """Return the content of a file. Raises SourceError if it is empty or cannot be read."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from None
    if not content.strip():
        raise _unreadable(file, "it is empty")
    return content


def _unreadable(file: Path, reason: str) -> SourceError:
    return SourceError(f"cannot read the service account in {file}: {reason}; {_NO_ACCOUNT}")


class CredentialStore:
    """Keep credentials and renew them. Any thread may call it. Raises SourceError for unusable settings.

    Construction runs no credential plugin.
    """

    def __init__(self, kubeconfig: str | Kubeconfigs, master: str) -> None:
        self._settings = (kubeconfig, master)
        self.server = load(kubeconfig, master, with_plugin=False).server
        self._current: Credentials | None = None
        self._renewing = threading.Lock()

    def get(self) -> Credentials:
        """Return fresh credentials, which may take as long as a credential plugin. Raises SourceError."""
        if current := self._fresh():
            return current
        alone = self._renewing.acquire(timeout=_PATIENCE)
        try:
            if current := self._fresh():
                return current
            self._current = renewed = load(*self._settings)
            return renewed
        finally:
            if alone:
                self._renewing.release()

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
    fresh_until = time.monotonic() + _FRESH
    if kubeconfig:
        # A pod needs neither this nor YAML.
        from pykubeproxy.sources.kubeconfig import load_kubeconfig

        kubeconfigs = Kubeconfigs((kubeconfig,)) if isinstance(kubeconfig, str) else kubeconfig
        return load_kubeconfig(kubeconfigs, master, fresh_until, with_plugin)
    if master:
        url = server_url(master, tls=False)
        return Credentials(ServerConfig(url, proxy_for(url, "", os.environ)), fresh_until)
    return _pod_credentials(fresh_until)
