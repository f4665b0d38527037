"""A Kubernetes service proxy that works through iptables."""

__version__ = "0.1.0"
