"""Read the service account of this pod, as client-go does."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from pykubeproxy.sources.kubeconfig import server_url
from pykubeproxy.sources.watch import SourceError

_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ADVICE = "set --kubeconfig or --master, or run in a pod with a service account"
_MOUNT = "let the kubelet mount it (automountServiceAccountToken), or set --kubeconfig or --master"


class ServiceAccount(msgspec.Struct, frozen=True):
    """The URL of the API server, the path of its certificate authority, and a token, which expires after some time."""

    url: str
    ca_file: str
    token: str


def read(environment: Mapping[str, str]) -> ServiceAccount:
    """Return the service account, from the `environment` and the files that the kubelet gives a pod. Raises SourceError."""
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise SourceError(f"no API server configured: {_ADVICE}")
    port = environment.get("KUBERNETES_SERVICE_PORT", "")
    if not port:
        raise SourceError(f"no API server configured: KUBERNETES_SERVICE_PORT is not set; {_ADVICE}")
    url = server_url(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", tls=True)
    ca_file = _FOLDER / "ca.crt"
    _content(ca_file)
    file = _FOLDER / "token"
    try:
        # A line break at its end is illegal in a header.
        return ServiceAccount(url, str(ca_file), _content(file).decode().strip())
    except UnicodeDecodeError:
        raise _unreadable(file, "it is not text") from None


def _content(file: Path) -> bytes:
    """Return the content of a file. Raises SourceError if it is empty or cannot be read."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from None
    if not content.strip():
        raise _unreadable(file, "it is empty")
    return content


def _unreadable(file: Path, reason: str) -> SourceError:
    return SourceError(f"cannot read the service account in {file}: {reason}; {_MOUNT}")
