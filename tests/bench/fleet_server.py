"""Serve a generated fleet as a process: `python -m tests.bench.fleet_server 500 DIRECTORY`.

The pods of the nodes print the output of iptables-save from files. One node fails, and one never answers.
"""

import gc
import random
import resource
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from pykubeproxy.lab.api import Object
from pykubeproxy.lab.apiserver import ApiServer, Sandbox, Store
from pykubeproxy.lab.apiserver import store as store_module
from pykubeproxy.objects import Family, Node
from pykubeproxy.rules.ruleset import Ruleset
from pykubeproxy.services.cluster import Cluster
from tests.fakes.cluster import certificate
from tests.fleet import FleetNode, NodeKind, Size, cluster, context, nodes, objects, saved, tables
from tests.nft_form import TABLE, nft_table

FAILING, HANGING = "node11", "node12"
# The Services whose last endpoint the stale nodes do not have.
_CHANGED = frozenset({3, 4, 5})
# All objects are this old.
_CREATED = "2026-01-01T00:00:00Z"
_IPVS = "*nat\n:KUBE-SERVICES - [0:0]\n[0:0] -A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT\nCOMMIT\n"


def main(number: str, directory: str, nftables: str = "") -> None:
    """Serve until SIGTERM. Print the kubeconfig on the first line, the CPU seconds of serving on the second."""
    stop = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)  # before any thread begins
    folder, size = Path(directory), Size(int(number), nftables=bool(nftables))
    current, before = cluster(size), cluster(size, _CHANGED)
    store = Store()
    with mock.patch.object(store_module, "now", return_value=_CREATED):
        store.load(_objects(size))
    for one in nodes(size):
        _write_programs(folder / one.node.name, one, before if one.kind is NodeKind.STALE else current)
    gc.freeze()

    def sandbox(pod: Object) -> Sandbox:
        return Sandbox(environment={"PATH": str(folder / pod["spec"]["nodeName"])})

    with ApiServer(store=store, tls=certificate(folder), runtime=sandbox) as server:
        started = _cpu_seconds()
        print(server.kubeconfig(folder / "kubeconfig"), flush=True)
        signal.sigwait(stop)
        print(_cpu_seconds() - started, flush=True)


def _cpu_seconds() -> float:
    used = [resource.getrusage(item) for item in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


def _write_programs(folder: Path, one: FleetNode, objects: Cluster) -> None:
    """Write the programs of the image, and what they print."""
    folder.mkdir()
    rules = tables(one, objects)
    nft = folder / "nft"
    table = folder / "nft.json"
    if one.nftables:
        rules = {family: Ruleset(family, {}) for family in Family}
        table.write_text(nft_table(objects, context(one.node)))
    listing = f"echo table ip {TABLE}" if one.nftables else ":"
    printed = f"exec /bin/cat {shlex.quote(str(table))}"
    nft.write_text(f'#!/bin/sh\ncase "$*" in "list tables") {listing};; *) {printed};; esac\n')
    nft.chmod(0o700)
    for family, prefix in ((Family.IPV4, "iptables"), (Family.IPV6, "ip6tables")):
        program, output = folder / f"{prefix}-nft-save", folder / f"{prefix}.txt"
        output.write_text(_saved(one, rules[family]))
        commands = {
            FAILING: "echo 'Could not fetch rule set generation id' >&2; exit 4",
            HANGING: "exec /bin/sleep 3600",
        }
        command = commands.get(one.node.name, f"exec /bin/cat {shlex.quote(str(output))}")
        program.write_text(f"#!/bin/sh\n{command}\n")
        program.chmod(0o700)


def _saved(one: FleetNode, rules: Ruleset) -> str:
    """Return the tables with counters; each node has counted other packets."""
    if one.kind is NodeKind.IPVS:
        header = saved(rules).partition("\n")[0]
        return f"{header}\n{_IPVS}"
    drawn = random.Random(one.node.name)
    first, *others = saved(rules).split("[12:720]")
    counts = (f"[{item}:{60 * item}]" for item in drawn.choices(range(100_000), k=len(others)))
    return first + "".join(f"{count}{text}" for count, text in zip(counts, others, strict=True))


def _objects(size: Size) -> Iterator[Object]:
    yield from objects(size)
    for one in nodes(size):
        yield _node(one.node)
        yield _pod(one)


def _node(node: Node) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": {"topology.kubernetes.io/zone": node.zone}},
        "spec": {"podCIDR": node.pod_cidrs[0], "podCIDRs": list(node.pod_cidrs)},
        "status": {"addresses": [{"type": "InternalIP", "address": item} for item in node.addresses]},
    }


def _pod(one: FleetNode) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "kube-system",
            "name": f"kube-proxy-{one.node.name}",
            "labels": {"k8s-app": "kube-proxy"},
            "annotations": {"lab.pykubeproxy/published": "true"},
        },
        "spec": {
            "nodeName": one.node.name,
            "hostNetwork": True,
            "containers": [{"name": "kube-proxy", "image": f"registry.example/kube-proxy:{one.form.value}"}],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": "kube-proxy", "ready": True, "restartCount": 0, "state": {"running": {}}}
            ],
        },
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
