"""Where exec runs the commands of pods in a lab: the network namespaces of its nodes and pods, and no others."""

from functools import partial

from pykubeproxy.lab.agents import node_environment
from pykubeproxy.lab.apiserver import ApiError, Sandbox
from pykubeproxy.lab.apiserver.resources import JsonObject
from pykubeproxy.lab.machine import RunDirectory
from pykubeproxy.lab.network import entered, lab_namespaces, namespace_prefix


def sandbox(lab: str, pod: JsonObject) -> Sandbox:
    """Return where the commands of a pod run: its node with hostNetwork, else the lab's pod of this name.

    Raises ApiError (500) if this lab has no such node or pod.
    """
    meta, spec = pod["metadata"], pod["spec"]
    host = spec["nodeName"] if spec.get("hostNetwork") else meta["name"]
    namespace = f"{namespace_prefix(lab)}{host}"
    is_ours = spec.get("hostNetwork") or meta["namespace"] == "default"
    if not is_ours or namespace not in lab_namespaces(lab):
        raise ApiError(
            500, f"error dialing backend: lab {lab} has no network namespace for pod {meta['name']}"
        )
    return Sandbox(node_environment(RunDirectory(lab).logs, host), partial(entered, namespace))
