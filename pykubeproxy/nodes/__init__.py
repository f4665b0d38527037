"""Where the state of nodes comes from: this node, saved rules, bundles, manifests, a cluster.

Each source makes the values of `inspect/node.py`, so no command depends on the source.
"""
