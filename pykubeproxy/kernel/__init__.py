"""The interface of the agent to Linux: iptables, conntrack, nfacct, nf_tables, addresses, processes, kernel settings.

It calls command-line tools and netlink, and makes no decision about rules.
"""

from pykubeproxy.kernel.addresses import local_addresses, watch_addresses
from pykubeproxy.kernel.backend import choose_backend, other_backend_with_chain
from pykubeproxy.kernel.errors import (
    Failed,
    KernelError,
    Missing,
    NotPermitted,
    Rejected,
    TimedOut,
    Unreadable,
)
from pykubeproxy.kernel.external_write import TABLES, ExternalWrite, TableCounts
from pykubeproxy.kernel.features import (
    Features,
    has_nat,
    ipv6_disabled,
    load_modules,
    probe_features,
    unsupported_reason,
)
from pykubeproxy.kernel.instance_lock import AlreadyRunning, InstanceLock
from pykubeproxy.kernel.iptables import Iptables, Tables, open_iptables
from pykubeproxy.kernel.live import live_ruleset, live_ruleset_about
from pykubeproxy.kernel.requirements import NotANode, require_linux, require_node
from pykubeproxy.kernel.runner import Runner, kill_commands
from pykubeproxy.kernel.tools import Backend
from pykubeproxy.kernel.watch import TableWatch, WatchedTables, watch_tables
