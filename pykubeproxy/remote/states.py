"""The state of the proxy on each node: from its pod, and from its rules or its agent."""

import msgspec

from pykubeproxy.objects import Node
from pykubeproxy.remote.proxies import ProxyPod
from pykubeproxy.remote.reading import NodeAccess, NodePods, ReadNode, UnreadNode, read_node
from pykubeproxy.sources.exec import run
from pykubeproxy.sources.failures import Failure
from pykubeproxy.wording import one_line

IPTABLES = "iptables"


class ProxyState(msgspec.Struct, frozen=True):
    """The proxy of one node.

    `proxy` is None without a pod. `mode` is "iptables", "ipvs", "nftables", "kernelspace", or "" if unknown; `backend`
    is that of its rules, "nft" or "legacy", or "". `read` is the outcome of reading the rules, None for our agents,
    which are asked instead: `answer` is what the agent printed, `failure` why it did not.
    """

    node: Node
    proxy: ProxyPod | None
    read: ReadNode | UnreadNode | None = None
    answer: bytes = b""
    failure: str = ""

    @property
    def mode(self) -> str:
        match self.read:
            case ReadNode():
                return IPTABLES
            case UnreadNode(mode=mode):
                return mode
        return IPTABLES

    @property
    def backend(self) -> str:
        if isinstance(self.read, ReadNode):
            return next((it.backend for it in self.read.tables.values()), "")
        return ""


def proxy_state(access: NodeAccess, node: Node, pods: NodePods, command: str) -> ProxyState:
    """Return the state of the proxy of a node. `command` is the one to run in pods of our agents, such as "status"."""
    proxy = pods.proxy(node)
    if proxy is None or not proxy.ours or not proxy.pod.runs:
        return ProxyState(node, proxy, read_node(access, node, pods))
    try:
        answer = run(access.client, proxy.target, ("pykubeproxy", command, "-o", "json"))
    except Failure as failure:
        return ProxyState(node, proxy, failure=str(failure))
    if answer.output.lstrip().startswith(b"{"):
        return ProxyState(node, proxy, answer=answer.output)
    reason = one_line(answer.errors) or f"exit status {answer.exit_code}"
    return ProxyState(node, proxy, failure=f"`pykubeproxy {command}` in pod {proxy.pod} failed: {reason}")
