"""A Kubernetes service proxy that works through iptables."""

__version__ = "0.1.0"
# Of the JSON that commands print and /statusz gives. Keys may be added to it; none changes its meaning or goes.
API_VERSION = "pykubeproxy/v1"
