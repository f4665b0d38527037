"""Read the tables of nodes through an API server, by exec into the pods of their proxies.

for node in read_nodes(NodeAccess(client), nodes):
    match node:
        case ReadNode(): ...
        case UnreadNode(reason=reason): ...
"""

from pykubeproxy.remote.debug_pods import DebugPods
from pykubeproxy.remote.reading import NodeAccess, ReadNode, UnreadNode, read_nodes
