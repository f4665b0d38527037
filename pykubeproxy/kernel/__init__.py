"""The only room that touches Linux: iptables, connection tracking, nfacct counters, kernel settings, addresses.

A thin interface over the command-line tools and netlink; it decides nothing about rules.
"""

from pykubeproxy.kernel.addresses import AddressWatch, LocalAddress, local_addresses
from pykubeproxy.kernel.backend import also_holding, choose
from pykubeproxy.kernel.drift import DriftWatch, Watched, watch_tables
from pykubeproxy.kernel.errors import (
    Failed,
    KernelError,
    Lacking,
    LockHeld,
    Missing,
    NotPermitted,
    NotStarted,
    Refused,
    TimedOut,
    Unreadable,
)
from pykubeproxy.kernel.features import Features, probe, unavailable
from pykubeproxy.kernel.foreign import TABLES, ExternalWrite, TableCounts
from pykubeproxy.kernel.instance_lock import AlreadyRunning, InstanceLock
from pykubeproxy.kernel.iptables import Iptables, Tables, open_iptables
from pykubeproxy.kernel.live import live, part_about
from pykubeproxy.kernel.modules import load_modules
from pykubeproxy.kernel.runner import Outcome, Runner
from pykubeproxy.kernel.tools import Backend

__all__ = [
    "TABLES",
    "AddressWatch",
    "AlreadyRunning",
    "Backend",
    "DriftWatch",
    "ExternalWrite",
    "Failed",
    "Features",
    "InstanceLock",
    "Iptables",
    "KernelError",
    "Lacking",
    "LocalAddress",
    "LockHeld",
    "Missing",
    "NotPermitted",
    "NotStarted",
    "Outcome",
    "Refused",
    "Runner",
    "TableCounts",
    "Tables",
    "TimedOut",
    "Unreadable",
    "Watched",
    "also_holding",
    "choose",
    "live",
    "load_modules",
    "local_addresses",
    "open_iptables",
    "part_about",
    "probe",
    "unavailable",
    "watch_tables",
]
