"""What the plugin looks up on the API server for names."""

from pathlib import Path
from typing import Any

from pykubeproxy.inspect.targets import parse_destination, parse_source
from pykubeproxy.nodes.directory import cluster_directory
from pykubeproxy.objects import Key
from pykubeproxy.sources import Client
from tests.fakes.cluster import service, slice_of
from tests.fakes.faulty_apiserver import Order
from tests.fakes.remote_nodes import RemoteNodes


def test_pod_of_another_service_if_pods_are_forbidden(
    tmp_path: Path,
) -> None:
    """EndpointSlices name it."""
    ends: tuple[Any, ...] = (parse_source("pod/default/web-1"), parse_destination("svc/default/other"))
    with RemoteNodes(tmp_path) as cluster:
        cluster.node("n1")
        for name, ip in (("web", "10.96.0.10"), ("other", "10.96.0.11")):
            cluster.api.store.create(service(name, clusterIP=ip, clusterIPs=[ip]))
        slice_ = slice_of("web", "10.244.1.5")
        slice_["endpoints"][0] |= {
            "nodeName": "n1",
            "targetRef": {"kind": "Pod", "namespace": "default", "name": "web-1"},
        }
        cluster.api.store.create(slice_)
        cluster.api.faults.apply(Order(do="error", path="/pods", status=403, times=100))
        found, remarks = cluster_directory(Client(str(cluster.kubeconfig), qps=-1), ends)
    pod = found.pods.get(Key("default", "web-1"))
    assert pod and (pod.addresses, pod.node) == (("10.244.1.5",), "n1")
    assert found.service(Key("default", "other"))
    assert remarks == ()
