"""Where the state of nodes comes from: this node, saved rules, bundles, manifests, a cluster.

Each source makes the values of `inspect/node.py`, so no command depends on the source.
"""

import socket


def host_name() -> str:
    """Return the name of this machine, spelled like a Node name."""
    return socket.gethostname().lower()
