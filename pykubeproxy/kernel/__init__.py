"""The interface to Linux: iptables, conntrack, nfacct, nf_tables, addresses, processes, kernel settings.

It calls command-line tools and netlink, and makes no decision about rules. Each name is imported at its first use, so
that the agent asks for the lists before it imports most of the package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pykubeproxy.kernel.errors import (
        Failed,
        KernelError,
        Missing,
        NotANode,
        NotPermitted,
        Rejected,
        TimedOut,
        Unreadable,
        UnsupportedFamily,
        require_linux,
        require_node,
    )
    from pykubeproxy.kernel.features import (
        Features,
        has_nat,
        ipv6_disabled,
        load_modules,
        probe_features,
        unsupported_reason,
    )
    from pykubeproxy.kernel.instance_lock import AlreadyRunning, InstanceLock, NoLock, lock_holder
    from pykubeproxy.kernel.iptables import (
        Backend,
        Iptables,
        Tables,
        choose_backend,
        open_iptables,
        other_backend_with_chain,
    )
    from pykubeproxy.kernel.live import live_ruleset, live_ruleset_about
    from pykubeproxy.kernel.network import local_addresses, watch_addresses
    from pykubeproxy.kernel.restore import RestoreSession
    from pykubeproxy.kernel.runner import Runner, kill_commands
    from pykubeproxy.kernel.watch import (
        TABLES,
        ExternalWrite,
        TableCounts,
        TableWatch,
        watch_tables,
    )

_NAMES = {
    "errors": "Failed KernelError Missing NotANode NotPermitted Rejected TimedOut Unreadable UnsupportedFamily"
    " require_linux require_node",
    "features": "Features has_nat ipv6_disabled load_modules probe_features unsupported_reason",
    "instance_lock": "AlreadyRunning InstanceLock NoLock lock_holder",
    "iptables": "Backend Iptables Tables choose_backend open_iptables other_backend_with_chain",
    "live": "live_ruleset live_ruleset_about",
    "network": "local_addresses watch_addresses",
    "restore": "RestoreSession",
    "runner": "Runner kill_commands",
    "watch": "TABLES ExternalWrite TableCounts TableWatch watch_tables",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # mypy would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return found
