"""Sources of objects: an API server or manifests. Both emit the same events: the complete state, then changes.

    client = Client(kubeconfig="/etc/kubernetes/proxy.conf")
    for watch in api_watches(client, "node1"):
        threading.Thread(target=watch.run, args=(mailbox.put,), name=watch.name).start()

A watch logs faults of a server and retries. SourceError is for faults that a retry does not help against.

The agent needs `api` (list and watch) with `tracker`, `wire`, `contact` and `watch`; `client` with `transport`,
`proxies` and `failures`; `credentials` with `kubeconfig` and `plugin`. Without an API server, it needs `manifests`. Only
commands use `queries` (one question, one answer) and `pods` (list them, run commands in them).
"""

from pykubeproxy.sources.api import (
    ListForbidden,
    Timing,
    api_watches,
)
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.watch import Outage, SourceError, Watch
