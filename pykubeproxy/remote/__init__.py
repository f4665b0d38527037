"""Read the tables of nodes through an API server, by exec into the pods of their proxies."""

from pykubeproxy.remote.reading import NodeAccess, ReadNode, UnreadNode, read_nodes
