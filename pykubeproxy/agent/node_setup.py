"""Set up the node, which needs full root rights: kernel modules, sysctls, conntrack limits and the OOM score.

A privileged init container can do this with --init-only; then the agent finds nothing to change.
"""

import contextlib
import errno
import os
from pathlib import Path

import msgspec
import structlog

from pykubeproxy.config import Config, Conntrack
from pykubeproxy.kernel import Backend, Runner, choose_backend, conntrack, load_modules, system
from pykubeproxy.kernel.runner import protect_lock_file

# The highest nf_conntrack_max for the number of cores, as in kube-proxy: an entry takes 320 bytes.
_HIGHEST_BY_CORES = 1048576

_OOM = "proc/self/oom_score_adj"
_NETFILTER = "proc/sys/net/netfilter/nf_conntrack_"

log = structlog.get_logger()


class KernelSetting(msgspec.Struct, frozen=True):
    """The value of a file below /proc or /sys; `path` has no leading slash.

    With `at_least`, keep a higher value.
    """

    path: str
    value: int
    at_least: bool = False


def settings(config: Config, cores: int) -> tuple[KernelSetting, ...]:
    """Return the settings that a configuration requires on a node with this many cores, except route_localnet."""
    return (
        *_table_size(config.conntrack, cores),
        *_tracking(config.conntrack),
        KernelSetting(_OOM, config.oom_score_adj),
    )


def prepare_backend(config: Config) -> Backend:
    """Load the kernel modules that rules need and protect the lock of iptables-legacy, as far as permitted.

    Return the backend. Raises Missing without iptables.
    """
    backend = choose_backend(config.iptables_backend.value)
    lock_file = Runner().lock_file
    try:
        protect_lock_file(lock_file)
    except OSError as failure:
        log.warning("xtables lock not protected", file=lock_file, error=failure.strerror, advice="chmod 600")
    load_modules(backend)
    return backend


def set_up(config: Config, root: Path = Path("/")) -> None:
    """Apply the settings of this node and this process, leaving correct values alone; log those that fail."""
    with contextlib.suppress(OSError):
        conntrack.load()
    for setting in settings(config, os.cpu_count() or 1):
        apply_setting(setting, root)


def apply_setting(setting: KernelSetting, root: Path = Path("/")) -> None:
    """Apply a setting, leaving a correct value alone; log a failure."""
    try:
        _apply(setting, root)
    except system.SettingError as error:
        log.warning(
            "kernel setting failed",
            setting=f"/{setting.path}",
            value=setting.value,
            error=os.strerror(error.errno or 0),
            advice=_advice(setting, error.errno),
        )


def _table_size(config: Conntrack, cores: int) -> tuple[KernelSetting, ...]:
    """Return the limit of the conntrack table, and the number of its buckets: four entries in each on average."""
    if not config.max_per_core:
        return ()
    connections = max(config.min, min(config.max_per_core * cores, _HIGHEST_BY_CORES))
    return (
        KernelSetting(f"{_NETFILTER}max", connections, at_least=True),
        KernelSetting("sys/module/nf_conntrack/parameters/hashsize", connections // 4, at_least=True),
    )


def _tracking(config: Conntrack) -> tuple[KernelSetting, ...]:
    values = {
        "tcp_timeout_established": config.tcp_established_timeout,
        "tcp_timeout_close_wait": config.tcp_close_wait_timeout,
        "udp_timeout": config.udp_timeout,
        "udp_timeout_stream": config.udp_stream_timeout,
        "tcp_be_liberal": config.tcp_be_liberal,
    }
    return tuple(
        # The kernel takes whole seconds; 0 would end every connection at once.
        KernelSetting(_NETFILTER + name, max(1, int(value)))
        for name, value in values.items()
        if value
    )


def _apply(setting: KernelSetting, root: Path) -> None:
    before = system.read_setting(setting.path, root)
    with contextlib.suppress(ValueError):
        current = int(before or "")
        if current == setting.value or (setting.at_least and current > setting.value):
            return
    system.write_setting(setting.path, setting.value, root)
    log.info("kernel setting changed", setting=f"/{setting.path}", value=setting.value, was=before)


def _advice(setting: KernelSetting, number: int | None) -> str:
    if setting.path == _OOM:
        return "grant CAP_SYS_RESOURCE, which is needed to lower it, or set a higher --oom-score-adj"
    if number == errno.ENOENT:
        of_conntrack = "nf_conntrack" in setting.path
        return "load the kernel module nf_conntrack" if of_conntrack else "use a kernel that has this setting"
    return (
        f"write {setting.value} to it on the node, or run `pykubeproxy run --init-only` with the same"
        " configuration in a privileged init container"
    )
