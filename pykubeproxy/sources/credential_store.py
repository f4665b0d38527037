"""Load and renew credentials: from a kubeconfig, the master URL or the pod's service account."""

import os
import threading
import time
from typing import TYPE_CHECKING

from pykubeproxy.sources.credentials import Credentials, master_credentials, pod_credentials
from pykubeproxy.sources.watch import SourceError

if TYPE_CHECKING:
    from pykubeproxy.sources.kubeconfig import Kubeconfigs

# Read credentials from files again after this many seconds: the kubelet renews a token minutes before it expires.
_FRESH = 60.0
# A request waits this many seconds for a plugin that another request runs; then it runs the plugin itself.
_PATIENCE = 5.0
# Renewals at once: nothing ends a request to an identity provider.
_MAX_RENEWALS = 8


class CredentialStore:
    """Keep credentials and renew them. Any thread may call it. Raises SourceError for unusable settings.

    Construction runs no credential plugin.
    """

    def __init__(self, kubeconfig: "str | Kubeconfigs", master: str) -> None:
        self._settings = (kubeconfig, master)
        self.server = load(kubeconfig, master, with_plugin=False).server
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


def load(kubeconfig: "str | Kubeconfigs", master: str, *, with_plugin: bool = True) -> Credentials:
    """Read the files, and run the credential plugin if there is one and `with_plugin` is set.

    `kubeconfig` is a path, or several to merge; `master` is a URL that overrides the kubeconfig's. Without both, use the
    pod's service account. Raises SourceError.
    """
    fresh_until = time.monotonic() + _FRESH
    if kubeconfig:
        # A pod needs neither this nor YAML.
        from pykubeproxy.sources.kubeconfig import load_kubeconfig

        return load_kubeconfig(kubeconfig, master, fresh_until, with_plugin)
    if master:
        return master_credentials(master, os.environ, fresh_until)
    return pod_credentials(os.environ, fresh_until)
