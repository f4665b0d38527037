"""One tenant changes many quarantined Services: another tenant's changes arrive as usual."""

import itertools
import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.cluster import service, slice_of
from tests.fakes.follower import eventually
from tests.fakes.http_client import fetch
from tests.fakes.process import METRICS
from tests.fakes.victim import victim

pytestmark = pytest.mark.root

SERVICES = 300
GAUGE = 'pykubeproxy_services_quarantined{{ip_family="IPv4"}} {}.0'


def rejecting_environment(folder: Path, backend: str) -> dict[str, str]:
    """Return an environment in which the rules of services named bad-… use a counter that does not exist."""
    name = f"iptables-{backend}-restore"
    real = shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    sed_script = r"/default\/bad-[0-9]* cluster IP/s/ -m tcp / -m tcp -m nfacct --nfacct-name nobody /"
    (folder / "tools").mkdir()
    (folder / "tools" / name).write_text(f"#!/bin/sh\nsed '{sed_script}' | {real} \"$@\"\n")
    (folder / "tools" / name).chmod(0o755)
    return {"PATH": f"{folder}/tools:{os.environ['PATH']}"}


@pytest.mark.parametrize("backend", ["nft", "legacy"])
def test_changes_of_quarantined_services_delay_nobody(backend: str, tmp_path: Path) -> None:
    environment = rejecting_environment(tmp_path, backend)
    with victim(backend, tmp_path, environment=environment) as made:
        allowed = made.allowed()
        slices = []
        for number in range(SERVICES):
            name = f"bad-{number}"
            made.api.store.create(service(name, clusterIP=f"10.96.{number // 200 + 20}.{number % 200}"))
            slices.append(made.api.store.create(slice_of(name, f"10.244.{number // 200}.{number % 200}")))
        gauge = GAUGE.format(SERVICES)
        eventually(lambda: gauge in fetch(METRICS, "/metrics").body, 120)
        addresses = itertools.count()

        def act() -> None:
            """Change a third of the Services."""
            last = next(addresses) % 250
            for number in range(last % 3, SERVICES, 3):
                endpoints = slice_of("", f"10.245.{number % 250}.{last}")["endpoints"]
                slices[number] = made.api.store.replace(slices[number] | {"endpoints": endpoints})

        assert made.median_while(act) <= allowed
        assert gauge in fetch(METRICS, "/metrics").body
