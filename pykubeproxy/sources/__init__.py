"""Sources of objects: an API server or manifests. Both emit the same events: the complete state, then changes.

    client = Client(kubeconfig="/etc/kubernetes/proxy.conf")
    for watch in api_watches(client, "node1"):
        threading.Thread(target=watch.run, args=(mailbox.put,), name=watch.name).start()

A watch logs faults of a server and retries. SourceError is for faults that a retry does not help against.
"""

from pykubeproxy.sources.api import (
    ListForbidden,
    Timing,
    all_objects,
    api_watches,
    list_kind,
    service_objects,
)
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.watch import Outage, SourceError, Watch
