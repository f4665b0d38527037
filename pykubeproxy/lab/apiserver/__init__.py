"""A small Kubernetes API server: Services, EndpointSlices, Nodes, Pods and Events over real HTTP.

It serves lists, pages, watches, bookmarks and errors as a real API server does, and exec of pods over WebSocket.
`python -m pykubeproxy.lab.apiserver` runs it as a process of a lab.
"""

from pykubeproxy.lab.apiserver.kubelet import Runtime, Sandbox
from pykubeproxy.lab.apiserver.resources import ENDPOINT_SLICES, EVENTS, NODES, PODS, SERVICES, ApiError
from pykubeproxy.lab.apiserver.server import ApiServer
from pykubeproxy.lab.apiserver.store import Store
