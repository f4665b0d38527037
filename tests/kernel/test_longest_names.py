"""The kernel accepts rules with the longest names and the largest objects."""

import msgspec
import pytest

from pykubeproxy.kernel import Iptables, nfacct
from pykubeproxy.objects import Family, Kind, Updated, decode
from pykubeproxy.rules import skeleton
from pykubeproxy.rules.render import render
from tests.fakes.synced import SyncedFamily, flags_context
from tests.strategies import NODE

LONG = "x" * 63
VIP = {Family.IPV4: "10.96.0.10", Family.IPV6: "fd00:96:1111:2222:3333:4444:5555:6666"}
OTHERS = {
    Family.IPV4: ("192.0.2.7", "198.51.100.7"),
    Family.IPV6: ("2001:db8::ffff:0:1", "2001:db8::1.2.3.4"),
}
RANGE = {Family.IPV4: "203.0.113.0/24", Family.IPV6: "2001:db8:5::/64"}
POD = {Family.IPV4: "10.244.255.{}", Family.IPV6: "fd00:10:244:1111:2222:3333:4444:{}"}


@pytest.mark.root
@pytest.mark.parametrize("dispatch", ["flat", "tree"])
def test_longest_names_read_back(iptables: Iptables, inside: str, dispatch: str) -> None:
    """Comments have at most 255 characters."""
    family, names = iptables.family, {"name": LONG, "namespace": LONG}
    for name in skeleton.NFACCT_NAMES:
        assert nfacct.ensure(name) == ""
    external, balancer = OTHERS[family]
    service = {
        "metadata": names,
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": VIP[family],
            "ports": [
                {"name": f"{n}{LONG[:-1]}", "port": 65535 - n, "nodePort": 32700 + n, "protocol": protocol}
                for n, protocol in enumerate(("TCP", "UDP", "SCTP"))
            ],
            "externalIPs": [external],
            "loadBalancerSourceRanges": [RANGE[family]],
            "externalTrafficPolicy": "Local",
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86400}},
            "healthCheckNodePort": 32767,
        },
        "status": {"loadBalancer": {"ingress": [{"ip": balancer}]}},
    }
    slice_ = {
        "metadata": {**names, "name": "y" * 253, "labels": {"kubernetes.io/service-name": LONG}},
        "addressType": family.value,
        "endpoints": [{"addresses": [POD[family].format(n)], "nodeName": NODE} for n in range(1, 140)],
        "ports": [
            {"name": f"{n}{LONG[:-1]}", "port": 65535, "protocol": protocol}
            for n, protocol in enumerate(("TCP", "UDP", "SCTP"))
        ],
    }
    objects = ((Kind.SERVICE, service), (Kind.ENDPOINT_SLICE, slice_))
    events = [Updated(decode(kind, msgspec.json.encode(it))) for kind, it in objects]
    context = flags_context(family, dispatch=dispatch, cluster_cidr="10.244.0.0/16,fd00:10:244::/56")
    synced = SyncedFamily(*events, context=context, live=iptables)
    synced.sync()
    live, rendered = iptables.save().chains, render(synced.cluster, context).chains
    assert {key: live[key] for key in rendered} == rendered
    assert max(len(rule) for rules in rendered.values() for rule in rules) > 255
