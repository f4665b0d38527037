"""Where objects come from: an API server, or manifests. Both yield the same events, first the whole, then the changes.

    client = Client(kubeconfig="/etc/kubernetes/proxy.conf")
    for watch in api_watches(client, "node1"):
        threading.Thread(target=watch.run, args=(mailbox.put,), name=watch.name).start()

Troubles with a server are logged here and waited out; SourceError is what cannot be helped by waiting.
"""

from pykubeproxy.sources.api import Timing, api_watches
from pykubeproxy.sources.asking import service_objects
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.manifests import Manifests, ManifestWatch, load_manifests
from pykubeproxy.sources.watch import Emit, SourceError, Trouble, Watch

__all__ = [
    "Client",
    "Emit",
    "ManifestWatch",
    "Manifests",
    "SourceError",
    "Timing",
    "Trouble",
    "Watch",
    "api_watches",
    "load_manifests",
    "service_objects",
]
