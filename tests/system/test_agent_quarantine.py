"""An agent with a service, or a dispatch tree, whose rules the kernel rejects."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pykubeproxy.agent.observe.status import decode
from pykubeproxy.lab.apiserver import SERVICES, ApiServer
from pykubeproxy.rules.dispatch import TREE_ABOVE
from pykubeproxy.sources import Client
from tests.fakes.cluster import node, server, service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import METRICS, answers, inside_a_namespace, running, saved

pytestmark = pytest.mark.root

GAUGE = 'pykubeproxy_services_quarantined{{ip_family="IPv4"}} {}'


BAD_SERVICE = "/default.bad cluster IP/s/ -m tcp / -m tcp -m nfacct --nfacct-name nobody /"
BRANCHES = "s/ -m comment --comment .services at / -m nfacct --nfacct-name nobody&/"


def rejecting_environment(folder: Path, backend: str, sed_script: str = BAD_SERVICE) -> dict[str, str]:
    """Return an environment in which some rules use a counter that does not exist, until a file `well` is there."""
    name = f"iptables-{backend}-restore"
    real = shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    script = f'#!/bin/sh\n[ -e {folder}/well ] && exec {real} "$@"\nsed \'{sed_script}\' | {real} "$@"\n'
    (folder / "tools").mkdir()
    (folder / "tools" / name).write_text(script)
    (folder / "tools" / name).chmod(0o755)
    return {"PATH": f"{folder}/tools:{os.environ['PATH']}", "XTABLES_LOCKFILE": str(folder / "lock")}


def command(*words: str) -> str:
    program = [sys.executable, "-c", "from pykubeproxy.cli import main; main()"]
    return " ".join(subprocess.run([*program, *words], capture_output=True, text=True).stdout.split())


def events(api: ApiServer) -> list[tuple[str, str, str]]:
    path = "/apis/events.k8s.io/v1/namespaces/default/events"
    with Client(master=api.url).stream(path, {}, resource="events", idle=5) as pieces:
        found = json.loads(b"".join(pieces))["items"]
    return [(it["regarding"]["name"], it["regarding"].get("uid", ""), it["reason"]) for it in found]


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_a_rejected_service_is_quarantined_and_released(backend: str, tmp_path: Path) -> None:
    """All others are served; log, metric, event, status, page and dump-rules name it."""
    flags = ("--hostname-override=node1", f"--iptables-backend={backend}")
    log = tmp_path / "agent.log"
    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        made = api.store.create(service("bad", clusterIP="10.96.0.10"))
        api.store.create(slice_of("bad", "10.244.0.5"))
        api.store.create(service("good", clusterIP="10.96.0.11"))
        api.store.create(slice_of("good", "10.244.0.6"))
        with running(log, *flags, "--master", api.url, environment=rejecting_environment(tmp_path, backend)):
            eventually(lambda: answers(METRICS, "/healthz", 200))
            eventually(lambda: GAUGE.format("1.0") in fetch(METRICS, "/metrics").body)
            rules = "\n".join(saved(f"iptables-{backend}-save"))
            assert "-A KUBE-SERVICES -d 10.96.0.11/32 -p tcp" in rules
            assert '-d 10.96.0.10/32 -p tcp -m comment --comment "default/bad is quarantined"' in rules
            eventually(lambda: ("bad", made["metadata"]["uid"], "ServiceQuarantined") in events(api))
            status = decode(fetch(METRICS, "/statusz", accept="application/json").body.encode())
            (quarantined,) = status.families[0].quarantined
            assert (str(quarantined.port_name), quarantined.rejects_clients) == ("default/bad", True)
            page = fetch(METRICS, "/statusz", accept="text/html").body
            assert "default/bad" in page.partition("Quarantined")[2]
            assert "Quarantined: 1. They are not served." in command("status")
            dumped = command("dump-rules", "bad", "--iptables-backend", backend)
            assert (
                "cluster IP 10.96.0.10:80 rejected: quarantined (`pykubeproxy status` has the reason)"
                in dumped
            )
            assert log.read_text().count("service quarantined") == 1

            (tmp_path / "well").touch()
            api.store.replace(made | {"spec": made["spec"] | {"ports": [{"port": 81, "protocol": "TCP"}]}})
            eventually(lambda: GAUGE.format("0.0") in fetch(METRICS, "/metrics").body)
            assert "-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp" in "\n".join(saved(f"iptables-{backend}-save"))
            assert "service released from quarantine" in log.read_text()
            assert "quarantined" not in fetch(METRICS, "/statusz", accept="text/html").body.lower()


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_a_rejected_dispatch_tree_is_replaced_by_a_flat_chain(backend: str, tmp_path: Path) -> None:
    """All Services are served; log, metric, status and page say so. A restart tries the tree again."""
    flags = ("--hostname-override=node1", f"--iptables-backend={backend}")
    log = tmp_path / "agent.log"
    environment = rejecting_environment(tmp_path, backend, BRANCHES)
    gauge = 'pykubeproxy_dispatch_tree_rejected{{ip_family="IPv4"}} {}'
    sentence = (
        "IPv4 uses a flat chain. iptables rejects the dispatch tree, which is tried again once an hour:"
    )

    def rules() -> list[str]:
        return [line for line in saved(f"iptables-{backend}-save") if line.startswith("-A KUBE-SERVICES -d")]

    with inside_a_namespace(), server() as api:
        api.store.create(node("node1", "192.168.99.10"))
        for number in range(1, TREE_ABOVE + 20):
            api.store.create(service(f"s{number}", clusterIP=f"10.96.0.{number}"))
            api.store.create(slice_of(f"s{number}", f"10.244.0.{number}"))
        with running(log, *flags, "--master", api.url, environment=environment):
            eventually(lambda: answers(METRICS, "/healthz", 200))
            eventually(lambda: gauge.format("1.0") in fetch(METRICS, "/metrics").body)
            assert sum("cluster IP" in rule for rule in rules()) == TREE_ABOVE + 19
            assert sentence in command("status")
            assert sentence in " ".join(fetch(METRICS, "/statusz", accept="text/html").body.split())
            api.store.delete(SERVICES, "default", "s7")
            eventually(lambda: sum("cluster IP" in rule for rule in rules()) == TREE_ABOVE + 18)
            assert log.read_text().count("dispatch tree rejected, using a flat chain") == 1
            assert "service quarantined" not in log.read_text()
        (tmp_path / "well").touch()
        with running(log, *flags, "--master", api.url, environment=environment):
            eventually(lambda: answers(METRICS, "/healthz", 200))
            eventually(lambda: len(rules()) < 20)
            eventually(lambda: gauge.format("0.0") in fetch(METRICS, "/metrics").body)
            assert sentence not in command("status")
