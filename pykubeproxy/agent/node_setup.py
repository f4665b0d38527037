"""The set-up that takes all of root's rights: kernel modules and settings, and how this process fares when memory is short.

It may be done by a privileged init container with --init-only; then nothing is left to do for the agent itself.
"""

import contextlib
import errno
import os
from pathlib import Path

import msgspec
import structlog

from pykubeproxy.config import Config, Conntrack
from pykubeproxy.kernel import Backend, choose, conntrack, load_modules, sysctl
from pykubeproxy.objects import Family, family_of
from pykubeproxy.rules.dispatch import serves_loopback

# More would only cost memory: 320 bytes an entry. kube-proxy stops here too.
HIGHEST_MAX = 1048576

_OOM = "proc/self/oom_score_adj"
_NETFILTER = "proc/sys/net/netfilter/nf_conntrack_"

log = structlog.get_logger()


class Wanted(msgspec.Struct, frozen=True):
    """A value for a file of the kernel's, whose path is without the leading slash.

    With `at_least`, what is higher already stays. `module` is the kernel module that brings the file.
    """

    path: str
    value: int
    at_least: bool = False
    module: str = ""


def wanted(config: Config, cores: int) -> tuple[Wanted, ...]:
    """The settings that a configuration asks for on a node with so many cores."""
    return (
        *_table_size(config.conntrack, cores),
        *_tracking(config.conntrack),
        *((Wanted("proc/sys/net/ipv4/conf/all/route_localnet", 1),) if _localhost(config) else ()),
        Wanted(_OOM, config.oom_score_adj),
    )


def provide_modules(config: Config) -> Backend:
    """Have the kernel modules loaded that the rules need, as far as that may and has to be done; returns the backend.

    What was missing in the end shows when the kernel is asked for it. Raises Missing without iptables.
    """
    backend = choose(config.iptables_backend.value)
    if complaint := load_modules(backend):
        log.debug("not every kernel module was loaded", said=complaint)
    return backend


def set_up(config: Config, root: Path = Path("/")) -> None:
    """Give this node and this process the settings they ought to have; what has its value already is not touched.

    Whatever is refused is a warning: the agent can do without.
    """
    with contextlib.suppress(OSError):
        conntrack.load()
    for setting in wanted(config, os.cpu_count() or 1):
        try:
            _apply(setting, root)
        except sysctl.SysctlError as error:
            _warn(setting, error.errno)


def _table_size(config: Conntrack, cores: int) -> tuple[Wanted, ...]:
    """How many connections are tracked, and in how many buckets: with four in each, finding one stays quick."""
    if not config.max_per_core:
        return ()
    connections = min(max(config.min, config.max_per_core * cores), HIGHEST_MAX)
    buckets = "sys/module/nf_conntrack/parameters/hashsize"
    return (
        Wanted(f"{_NETFILTER}max", connections, at_least=True, module="nf_conntrack"),
        Wanted(buckets, connections // 4, at_least=True, module="nf_conntrack"),
    )


def _tracking(config: Conntrack) -> tuple[Wanted, ...]:
    values = {
        "tcp_timeout_established": config.tcp_established_timeout,
        "tcp_timeout_close_wait": config.tcp_close_wait_timeout,
        "udp_timeout": config.udp_timeout,
        "udp_timeout_stream": config.udp_stream_timeout,
        "tcp_be_liberal": config.tcp_be_liberal,
    }
    return tuple(
        # The kernel counts whole seconds; a timeout of none would end every connection at once.
        Wanted(_NETFILTER + name, max(1, int(value)), module="nf_conntrack")
        for name, value in values.items()
        if value
    )


def _localhost(config: Config) -> bool:
    """Whether node ports are served on 127.0.0.1, from where the kernel routes nothing away by itself."""
    addresses = config.node_port_addresses
    if not config.iptables.localhost_node_ports or addresses == ("primary",):
        return False
    return serves_loopback(tuple(cidr for cidr in addresses if family_of(cidr) is Family.IPV4))


def _apply(setting: Wanted, root: Path) -> None:
    """Raises SysctlError."""
    now = sysctl.read(setting.path, root)
    if now is not None and _suffices(now, setting):
        return
    sysctl.write(setting.path, setting.value, root)
    log.info("kernel setting changed", setting=f"/{setting.path}", value=setting.value, was=now)


def _suffices(now: str, setting: Wanted) -> bool:
    try:
        return int(now) >= setting.value if setting.at_least else int(now) == setting.value
    except ValueError:
        return False


def _warn(setting: Wanted, number: int | None) -> None:
    log.warning(
        "a kernel setting could not be made; the agent goes on without it",
        setting=f"/{setting.path}",
        value=setting.value,
        error=os.strerror(number or 0),
        advice=_advice(setting, number),
    )


def _advice(setting: Wanted, number: int | None) -> str:
    if setting.path == _OOM:
        return "lowering it takes CAP_SYS_RESOURCE; grant that, or give --oom-score-adj a higher value"
    if number == errno.ENOENT:
        return (
            f"load the kernel module {setting.module}" if setting.module else "this kernel does not have it"
        )
    return (
        f"write {setting.value} to it on the node, or run `pykubeproxy run --init-only` with the same"
        " configuration in a privileged init container"
    )
