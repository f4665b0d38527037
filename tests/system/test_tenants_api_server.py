"""A tenant who claims the address of the API server cannot cut off the agent."""

import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from pykubeproxy.cli.explain import explain
from pykubeproxy.lab.apiserver import EVENTS, SERVICES
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.http_client import fetch
from tests.fakes.process import HEALTH, METRICS, PROGRAM, answers, inside_a_namespace, running, saved
from tests.fakes.victim import Victim, victim
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.root

SERVER = "192.168.50.1"


def claim(made: Victim, field: str) -> None:
    """Create a Service that claims the API server's address, with an endpoint that leads nowhere."""
    numbers = {"api": made.api.port, "other": 9}
    target = [{"name": name, "port": 8080} for name in numbers]
    made.api.store.create({**slice_of("attacker", "10.244.66.66"), "ports": target})
    ports = [{"name": name, "port": number} for name, number in numbers.items()]
    fields = {"externalIPs": [SERVER]} if field == "externalIPs" else {"type": "LoadBalancer"}
    it = made.api.store.create(service("attacker", clusterIP="10.96.6.6", ports=ports, **fields))
    if field == "ingress":
        it["status"] = {"loadBalancer": {"ingress": [{"ip": SERVER}]}}
        made.api.store.replace(it, part="status")


def rules(backend: str) -> str:
    return "\n".join(saved(f"iptables-{backend}-save"))


def to_server(backend: str) -> str:
    """Return the rules that match the API server's address."""
    return "\n".join(line for line in saved(f"iptables-{backend}-save") if f"-d {SERVER}/" in line)


@contextmanager
def second(folder: Path, backend: str, url: str) -> Iterator[None]:
    """Run an agent after the victim's was killed."""
    flags = ("--hostname-override=node1", f"--iptables-backend={backend}", "--master", url)
    with running(folder / "second.log", *flags, environment={"XTABLES_LOCKFILE": str(folder / "lock")}):
        yield


def reconnected(made: Victim) -> float:
    """Return the median time of some changes, each after all connections of the agent broke."""
    times = []
    for _ in range(3):
        time.sleep(random.uniform(1.0, 2.0))  # minSyncPeriod delays each change differently, as in `measure`
        made.api.drop_connections()
        times.append(made.change())
    return statistics.median(times)


@pytest.mark.parametrize(("backend", "field"), [("nft", "externalIPs"), ("legacy", "ingress")])
def test_a_service_at_the_address_of_the_api_server_cuts_off_no_agent(
    backend: str, field: str, tmp_path: Path
) -> None:
    """Not even across a restart. Log, event and `explain` name the address; another port there is served."""
    with victim(backend, tmp_path, server_address=SERVER) as made:
        made.measure()
        claim(made, field)
        eventually(lambda: "--dport 9 " in to_server(backend))
        assert f"--dport {made.api.port} " not in to_server(backend)
        made.assert_usual(reconnected(made))
        assert made.log.read_text().count("external address skipped") == 1

        def recorded() -> list[str]:
            found = made.api.store.list(EVENTS)
            return [it["note"] for it in found if it["reason"] == "AddressSkipped"]

        eventually(recorded)
        (note,) = recorded()
        assert f"does not serve default/attacker at {SERVER}:{made.api.port}: " in note
        explained = " ".join(CliRunner().invoke(explain, ["default/attacker"]).stdout.split())
        assert f"{SERVER}:{made.api.port} is not served: this node reaches the API server there." in explained

        os.kill(made.pid, signal.SIGKILL)
        with second(tmp_path, backend, made.api.url):
            eventually(lambda: answers(METRICS, "/healthz", 200))
            made.change()
            made.api.store.delete(SERVICES, "default", "attacker")
            eventually(lambda: SERVER not in rules(backend))


def test_a_service_at_the_health_port_of_the_node_breaks_no_probe(tmp_path: Path) -> None:
    """Neither those of the kubelet over loopback, nor those of others at the node's address. The rest is served."""
    flags = (f"--healthz-bind-address={SERVER}:{HEALTH}", "--metrics-bind-address=0.0.0.0:10249")
    backend = "legacy"
    with victim(backend, tmp_path, *flags, server_address=SERVER) as made:
        made.api.store.replace(node("node1", SERVER), part="status")
        numbers = {"healthz": HEALTH, "metrics": METRICS, "other": 9}
        target = [{"name": name, "port": 8080} for name in numbers]
        made.api.store.create({**slice_of("attacker", "10.244.66.66"), "ports": target})
        ports = [{"name": name, "port": number} for name, number in numbers.items()]
        made.api.store.create(service("attacker", clusterIP="10.96.6.6", ports=ports, externalIPs=[SERVER]))
        eventually(lambda: "--dport 9 " in to_server(backend))
        for host in ("127.0.0.1", SERVER):
            assert fetch(HEALTH, "/livez", host=host).status == 200
        assert fetch(METRICS, "/healthz", host=SERVER).status == 200
        assert "--dport 102" not in to_server(backend)
        explained = " ".join(CliRunner().invoke(explain, ["default/attacker"]).stdout.split())
        for port in (HEALTH, METRICS):
            reason = "the agent serves its health or metrics there"
            assert f"{SERVER}:{port} is not served: {reason}." in explained


def test_a_client_at_the_cluster_ip_of_the_api_server_is_served(tmp_path: Path) -> None:
    """A pod's client uses the cluster IP of default/kubernetes, which must have rules like any other cluster IP."""
    backend = "nft"
    with victim(backend, tmp_path, server_address=SERVER) as made:
        made.measure()
        subprocess.run(["ip", "route", "add", "10.96.0.0/16", "dev", "lo"], check=True)
        store, port = made.api.store, made.api.port
        store.create(service("kubernetes", clusterIP="10.96.0.1", ports=[{"port": 443}]))
        store.create({**slice_of("kubernetes", SERVER), "ports": [{"port": port}]})
        served = "-d 10.96.0.1/32 -p tcp -m comment"
        eventually(lambda: f"--to-destination {SERVER}:{port}" in rules(backend))
        os.kill(made.pid, signal.SIGKILL)
        with second(tmp_path, backend, "http://10.96.0.1:443"):
            eventually(lambda: answers(METRICS, "/healthz", 200))
            made.change()
            assert served in rules(backend)
            store.create(slice_of("attacker", "10.244.66.66"))
            store.create(
                service("attacker", clusterIP="10.96.6.6", ports=[{"port": 443}], externalIPs=["10.96.0.1"])
            )
            eventually(lambda: "-d 10.96.6.6/32" in rules(backend))
            made.assert_usual(reconnected(made))
            assert "external address skipped" in (tmp_path / "second.log").read_text()


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_rules_of_an_earlier_proxy_at_the_address_of_the_api_server_are_deleted(
    backend: str, tmp_path: Path
) -> None:
    """An agent that gets no lists, because kube-proxy let a Service take over the address, connects after syncPeriod."""
    lock = {"XTABLES_LOCKFILE": str(tmp_path / "lock")}
    common = ("--hostname-override=node1", f"--iptables-backend={backend}", "--conntrack-max-per-core=0")
    with inside_a_namespace(SERVER), server(address=SERVER) as api:
        api.store.create(node("node1", "192.168.99.10"))
        claimed = service("attacker", clusterIP="10.96.6.6", ports=[{"port": api.port}], externalIPs=[SERVER])
        objects = {
            "kind": "List",
            "apiVersion": "v1",
            "items": [claimed, slice_of("attacker", "10.244.66.66")],
        }
        (tmp_path / "objects.json").write_text(json.dumps(objects))
        earlier = [*PROGRAM, *common, "--once", f"--manifests={tmp_path / 'objects.json'}"]
        subprocess.run(earlier, check=True, env={**os.environ, **lock})
        assert f"--dport {api.port} " in to_server(backend)
        log = tmp_path / "log"
        with running(log, *common, "--master", api.url, "--iptables-sync-period=2s", environment=lock):
            eventually(lambda: answers(METRICS, "/healthz", 200) and "rules in place" in log.read_text())
        assert "api server address released" in log.read_text()
