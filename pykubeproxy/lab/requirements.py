"""What the machine must have for a lab, and how to get what is missing."""

import os
import shutil
from pathlib import Path

from pykubeproxy.lab.agents import SYSTEM_PATH

TOOLS = ("iptables-save", "iptables-restore", "ip6tables-save", "ip6tables-restore")


class Unmet(RuntimeError):
    """The lab cannot run here; the text is one line that says what to do."""


def require() -> None:
    """Raise Unmet unless a lab can be built here."""
    if os.geteuid() != 0:
        raise Unmet("the lab makes network namespaces and needs root: run it with sudo")
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SYSTEM_PATH) is None]
    if missing:
        raise Unmet(f"missing: {', '.join(missing)}; install them with `apt-get install iptables`")
    if not Path("/proc/sys/net/ipv6").exists():
        raise Unmet("this kernel has IPv6 switched off; the lab uses both IPv4 and IPv6")
