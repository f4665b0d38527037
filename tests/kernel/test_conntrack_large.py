"""Measure a scan of 200,000 foreign conntrack entries."""

import sys
import time

import pytest

from pykubeproxy.kernel import Runner
from pykubeproxy.objects import Family
from tests.kernel.flows import fill

pytestmark = pytest.mark.root

ENTRIES = 200_000
MEBIBYTE = 1024
# A separate process, to measure its peak memory.
PROGRAM = """
import re, sys, time
from pathlib import Path
from pykubeproxy.kernel import conntrack
from pykubeproxy.objects import Family
from pykubeproxy.services.flows import Flush, StaleFlowFilter, NodePortAddresses, UdpPort
from pykubeproxy.services.ports import PortName

family = Family(sys.argv[1])
cluster_ip, node_port = (bytes((10, 96, 0, 10)), 53), (b"", 30053)
frontends = frozenset({cluster_ip, node_port})
port = UdpPort(frontends, frozenset(), cluster_ip, frozenset(), frozenset())
flush = Flush(family, {PortName("ns", "dns", "", "UDP"): port}, frozenset(), NodePortAddresses())
stale_flows = StaleFlowFilter(flush, lambda _: True)

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before, started = peak(), time.monotonic()
looked = stale = 0
for flow in conntrack.udp_flows(family):
    looked += 1
    stale += stale_flows.is_stale(flow.destination, flow.reply_source)
print(looked, stale, peak() - before, time.monotonic() - started)
"""


def test_scan_of_200_000_entries_needs_no_memory(inside: str, runner: Runner, family: Family) -> None:
    """No entry counts as stale; the time is printed."""
    started = time.monotonic()
    fill(family, ENTRIES)
    filled = time.monotonic() - started
    outcome = runner.run((sys.executable, "-c", PROGRAM, family.value))
    assert outcome.exit_code == 0, outcome.stderr
    looked, stale, kibibytes, seconds = outcome.stdout.split()
    print(f"{looked} entries: {float(seconds):.2f} s, {kibibytes} KiB more (made in {filled:.1f} s)")
    assert (int(looked), int(stale)) == (ENTRIES, 0)
    assert int(kibibytes) < 20 * MEBIBYTE
