"""`python -m tests.fakes.base_system SYSTEM ARGUMENTS…`: pykubeproxy without extras, on "linux" or "darwin".

As if on macOS, Python's modules lack what only Linux has. Paths, processes and the kernel stay those of this machine.
"""

import fcntl
import os
import select
import signal
import socket
import sys
import sysconfig
import time
from types import ModuleType

EXTRA = ("h11", "iptc", "prometheus_client", "pyroute2", "wsproto")
LINUX_ONLY = {
    fcntl: ("F_GETPIPE_SZ", "F_SETPIPE_SZ"),
    os: ("EFD_", "eventfd", "memfd_create", "pidfd_open", "sched_", "setns", "splice", "unshare"),
    select: ("EPOLL", "epoll"),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
    socket: (
        "AF_NETLINK",
        "NETLINK_",
        "SO_PEERCRED",
        "SOCK_CLOEXEC",
        "TCP_INFO",
        "TCP_KEEPIDLE",
        "TCP_USER_TIMEOUT",
    ),
    time: ("CLOCK_BOOTTIME",),
}


def pretend(system: str) -> None:
    """Take away the extras, and on "darwin" what only Linux has."""
    sys.modules.update(dict.fromkeys(EXTRA))  # type: ignore[arg-type] # an import raises ModuleNotFoundError
    if system == "darwin":
        vars(socket)["TCP_KEEPALIVE"] = socket.TCP_KEEPIDLE
        for module, prefixes in LINUX_ONLY.items():
            for name in [it for it in vars(module) if it.startswith(prefixes)]:
                delattr(module, name)
        proxies = ModuleType("_scproxy")  # macOS's proxy settings, for urllib
        vars(proxies).update(_get_proxies=dict, _get_proxy_settings=dict)
        sys.modules["_scproxy"] = proxies
        sysconfig.get_config_vars()  # from a file that is named for the system
        sys.platform = "darwin"


if __name__ == "__main__":
    pretend(sys.argv.pop(1))
    if sys.argv[1:3] == ["kubectl", "pykubeproxy"]:
        del sys.argv[1:3]
        from pykubeproxy.cli.kubectl import main as plugin

        plugin()
    from pykubeproxy.cli import main

    main(prog_name="pykubeproxy")
