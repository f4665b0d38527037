"""A Kubernetes service proxy that works through iptables."""

__version__ = "0.1.0"
# JSON API version. Keys may be added, never changed or removed.
API_VERSION = "pykubeproxy/v1"
