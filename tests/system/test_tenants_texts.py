"""One tenant writes the largest objects that an API server stores: the agent starts, follows changes and stays small."""

import os
import re
import time
from pathlib import Path
from shutil import which

import pytest

from tests.fakes.cluster import service, slice_of
from tests.fakes.victim import Victim, victim

pytestmark = pytest.mark.root

LENGTH = 1_400_000


def megabytes(pid: int) -> float:
    """Return the resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


def commas(made: Victim) -> None:
    """Create four Services whose names have more commas than a list may have values."""
    for number in range(4):
        made.api.store.create(service(f"c{number}", type="ExternalName", externalName="," * LENGTH))


def test_long_texts_stop_no_agent_and_take_no_memory(tmp_path: Path) -> None:
    """An agent that starts beside Services of commas serves others; zones with an emoji take no memory."""
    with victim("nft", tmp_path, before=commas) as made:
        before = megabytes(made.pid)
        for number in range(40):
            hostile = slice_of(f"z{number}", f"10.7.0.{number + 1}")
            hostile["endpoints"][0]["zone"] = f"\N{CLOWN FACE}{number}{'z' * LENGTH}"
            made.api.store.create(hostile)
        made.change()
        assert megabytes(made.pid) - before < 60
        assert "watch failed" not in made.log.read_text()


def test_updates_during_a_long_sync_take_no_memory(tmp_path: Path) -> None:
    """Of one slice of 1000 endpoints, 300 times, while iptables takes long; then the victim's change is served."""
    slow, program = tmp_path / "slow", "iptables-nft-restore"
    tool = tmp_path / "tools" / program
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nwhile [ -e {slow} ]; do sleep 0.1; done\nexec {which(program)} "$@"\n')
    tool.chmod(0o755)
    environment = {"PATH": f"{tool.parent}:{os.environ['PATH']}"}
    with victim("nft", tmp_path, environment=environment) as made:
        endpoints = slice_of("large", *(f"10.7.{n // 250}.{n % 250 + 1}" for n in range(1000)))["endpoints"]
        large = made.api.store.create(slice_of("large"))
        made.change()
        slow.touch()
        made.api.store.create(service("trigger", clusterIP="10.96.9.7"))
        time.sleep(2)  # its sync begins
        before = megabytes(made.pid)
        for number in range(300):
            for position, endpoint in enumerate(endpoints):
                endpoint["targetRef"] = {"name": f"{number}-{position}-{'p' * 200}"}
            large = made.api.store.replace(large | {"endpoints": endpoints})
        time.sleep(1)  # the last ones arrive
        assert megabytes(made.pid) - before < 60
        slow.unlink()
        made.change()
