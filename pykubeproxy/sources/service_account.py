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
    _text(ca_file)
    return ServiceAccount(url, str(ca_file), _text(_FOLDER / "token"))


def _text(file: Path) -> str:
    """Return the text of a file without the line break at its end, which is illegal in a header. Raises SourceError."""
    try:
        text = file.read_text().strip()
        reason = "it is empty"
    except (OSError, UnicodeDecodeError) as error:
        text, reason = "", getattr(error, "strerror", None) or "it is not text"
    if not text:
        raise SourceError(f"cannot read the service account in {file}: {reason}; {_MOUNT}")
    return text
