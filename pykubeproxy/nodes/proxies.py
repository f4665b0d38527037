"""Find the pods of service proxies: in which container to run commands on each node, and which proxy runs there."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pykubeproxy.objects.pods import Container, Pod
from pykubeproxy.sources.client import Client
from pykubeproxy.sources.failures import Forbidden
from pykubeproxy.sources.pods import ContainerRef, list_pods
from pykubeproxy.wording import one_line

PYKUBEPROXY, KUBE_PROXY = "pykubeproxy", "kube-proxy"
_OURS = "app.kubernetes.io/name=pykubeproxy,app.kubernetes.io/component=service-proxy"
# As kubeadm and most distributions label the pods, and as GKE and AKS do.
_SELECTORS = (_OURS, "k8s-app=kube-proxy", "component=kube-proxy")
_KUBE_SYSTEM = "kube-system"
# The containers of manifests/ and of kubeadm, in the order in which they are tried.
_CONTAINERS = ("kube-proxy", "agent", "pykubeproxy")
_MODE = re.compile(r"--proxy-mode[= ](\S+)")


class OtherProxy(NamedTuple):
    """A program that can serve Services in place of kube-proxy, and the labels of its pods."""

    name: str
    selector: str


_OTHERS = (
    OtherProxy("Cilium", "k8s-app=cilium"),
    OtherProxy("kube-router", "k8s-app=kube-router"),
    OtherProxy("Antrea", "app=antrea,component=antrea-agent"),
    OtherProxy("OVN-Kubernetes", "app=ovnkube-node"),
    OtherProxy("Calico", "k8s-app=calico-node"),
)


class ProxyPod(msgspec.Struct, frozen=True):
    """The pod of a proxy, and its container.

    `proxy` is "pykubeproxy", "kube-proxy", or the name of the container if labels do not tell. `version` is the tag of
    the image, or "".
    """

    pod: Pod
    container: Container
    proxy: str
    version: str

    def __str__(self) -> str:
        return f"{self.proxy} {self.version}".strip()

    @property
    def ours(self) -> bool:
        """Whether it runs this program."""
        return self.proxy == PYKUBEPROXY

    @property
    def target(self) -> ContainerRef:
        """The container in which commands run."""
        return ContainerRef(self.pod.namespace, self.pod.name, self.container.name)

    @property
    def mode_flag(self) -> str:
        """The value of --proxy-mode, "" if the command line has none."""
        found = _MODE.search(" ".join(self.container.command))
        return found[1] if found else ""


def find_proxies(
    client: Client, *, pod_selector: str = "", namespace: str = "", node: str = ""
) -> Mapping[str, Sequence[ProxyPod]]:
    """Return the pods of proxies by node, running ones first; only those of `node` if given.

    Look in one namespace, by default kube-system, for pods with the network of their node: any tenant may give a pod the
    same labels. Raises Failure.
    """
    found = (
        pod
        for selector in ((pod_selector,) if pod_selector else _SELECTORS)
        for pod in list_pods(client, namespace or _KUBE_SYSTEM, labels=selector, node=node)
    )
    unique = {str(pod): pod for pod in found if pod.containers and pod.host_network}
    proxies: dict[str, list[ProxyPod]] = {}
    for pod in unique.values():
        proxies.setdefault(pod.node, []).append(_proxy(pod))
    for pods in proxies.values():
        pods.sort(key=_preference)
    return proxies


def _preference(proxy: ProxyPod) -> tuple[object, ...]:
    pod = proxy.pod
    return (
        not pod.runs,
        not proxy.container.ready,
        not proxy.ours,
        pod.name,
    )


def find_other_proxies(client: Client, nodes: Iterable[str]) -> Mapping[str, str]:
    """Return by node the name of another program that may serve Services there. Raises Failure."""
    wanted = set(nodes)
    only = next(iter(wanted)) if len(wanted) == 1 else ""
    found: dict[str, str] = {}
    for other in _OTHERS if wanted else ():
        for pod in _list(client, other.selector, only):
            # Only an administrator may give a pod the network of its node.
            if pod.node in wanted and pod.host_network:
                found.setdefault(pod.node, other.name)
    return found


def _list(client: Client, selector: str, node: str) -> tuple[Pod, ...]:
    try:
        return list_pods(client, labels=selector, node=node)
    except Forbidden:
        return list_pods(client, _KUBE_SYSTEM, labels=selector, node=node)


def _proxy(pod: Pod) -> ProxyPod:
    container = _container(pod)
    return ProxyPod(pod, container, _name(pod, container), version_of(container.image))


def _container(pod: Pod) -> Container:
    by_name = {container.name: container for container in pod.containers}
    names = (*_CONTAINERS, pod.default_container)
    return next((by_name[name] for name in names if name in by_name), pod.containers[0])


def _name(pod: Pod, container: Container) -> str:
    labels = pod.labels
    if labels.get("app.kubernetes.io/name") == PYKUBEPROXY:
        return PYKUBEPROXY
    if KUBE_PROXY in (labels.get("k8s-app"), labels.get("component"), container.name):
        return KUBE_PROXY
    return container.name


def version_of(image: str) -> str:
    """Return the tag of an image, "" without one: v1.36.0 of registry/kube-proxy:v1.36.0@sha256:..."""
    _, _, name = image.partition("@")[0].rpartition("/")
    return one_line(name.partition(":")[2])
