"""What this package requires of the system and of the installation: Linux, and the packages of the extra `node`."""

import sys
from importlib.util import find_spec

from pykubeproxy.kernel.errors import KernelError

_SYSTEMS = {"darwin": "macOS"}
# The modules of the extras in pyproject.toml.
_NODE = ("h11", "iptc", "prometheus_client", "pyroute2")
_LAB = (*_NODE, "wsproto")


class NotANode(KernelError):
    """This system or installation cannot do what only a node can."""


def require_linux(alternative: str = "") -> None:
    """Raise NotANode on another system than Linux; `alternative` is what the user can do besides."""
    if sys.platform != "linux":
        system = _SYSTEMS.get(sys.platform, sys.platform)
        raise NotANode(f"{system} has no iptables; run this command on a Linux node{alternative}")


def require_node(modules: tuple[str, ...] = _NODE, extra: str = "node") -> None:
    """Raise NotANode on another system than Linux, or without these modules of an extra."""
    require_linux()
    if missing := [module for module in modules if find_spec(module) is None]:
        raise NotANode(
            f"Python modules not installed: {', '.join(missing)}; run pip install 'pykubeproxy[{extra}]'"
        )


def require_lab() -> None:
    """Raise NotANode on another system than Linux, or without the modules of the extra `lab`."""
    require_node(_LAB, "lab")
