"""The values of options that commands of the plugin share."""

from typing import NamedTuple


class ServerOptions(NamedTuple):
    """Which API server to ask, as kubectl takes it. Empty values mean kubectl's defaults."""

    kubeconfig: str
    context: str


class PodOptions(NamedTuple):
    """From which pods to read the rules of nodes, and of how many nodes at once."""

    pod_selector: str
    pod_namespace: str
    debug_image: str
    at_once: int


class NodeSelection(NamedTuple):
    """The nodes to read: these, or all."""

    names: tuple[str, ...]
    everywhere: bool
