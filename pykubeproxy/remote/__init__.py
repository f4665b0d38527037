"""Read the tables of nodes through an API server, by exec into the pods of their proxies."""

from pykubeproxy.remote.debug_pods import DebugPods
from pykubeproxy.remote.proxies import ProxyPod
from pykubeproxy.remote.reading import (
    NodeAccess,
    NodePods,
    ReadNode,
    UnreadNode,
    find_node_pods,
    read_node,
    read_nodes,
)
from pykubeproxy.remote.side_by_side import side_by_side
