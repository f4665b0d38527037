"""A configuration file that changes while the agent runs."""

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from pykubeproxy.agent.mailbox import Mailbox, Reconfigured, Stop
from pykubeproxy.config import Config, Loaded, changed_fields

_PERIOD = 1.0  # seconds between two looks
# What is taken up while running, or counts only at the next start; sections end in a dot. For all else the process
# ends, to be started anew.
_LIVE = (
    "bindAddressHardFail",
    "clusterCIDR",
    "configSyncPeriod",
    "conntrack.",
    "detectLocal.",
    "detectLocalMode",
    "featureGates",
    "iptables.",
    "logging.verbosity",
    "nodePortAddresses",
    "oomScoreAdj",
    "pykubeproxy.dispatch",
)

log = structlog.get_logger()


class Split(msgspec.Struct, frozen=True):
    """The fields in which two configurations differ, by what it takes to take them up."""

    live: tuple[str, ...]
    restart: tuple[str, ...]


def split(old: Config, new: Config) -> Split:
    """Tell which fields changed, and which of them need a restart."""
    changed = changed_fields(old, new)
    live = tuple(field for field in changed if field.startswith(_LIVE))
    return Split(live, tuple(field for field in changed if field not in live))


class ConfigWatch:
    """Watches the configuration file; a ConfigMap's changes, which come by a swapped symbolic link, show as well.

    `loaded` is what the process was started with. `load` reads the file; what it raises is logged, and the configuration
    stays as it is. It looks at the file once a second: that sees every way in which files are replaced.
    """

    name = "watch-config"

    def __init__(self, path: str, loaded: Loaded, load: Callable[[], Loaded], mailbox: Mailbox) -> None:
        self._path = Path(path)
        self._loaded = loaded
        self._load = load
        self._mailbox = mailbox
        self._stopping = threading.Event()
        # The file may have changed since it was read, so it is read once more in any case.
        self._stamp: tuple[int, int, int] | None = None

    def stop(self) -> None:
        """Make `run` return."""
        self._stopping.set()

    def run(self) -> None:
        """Watch until `stop`."""
        while not self._stopping.wait(_PERIOD):
            stamp = self._look()
            # A file that is still being written has another stamp a moment later.
            if (
                stamp is None
                or stamp == self._stamp
                or self._stopping.wait(_PERIOD / 10)
                or self._look() != stamp
            ):
                continue
            self._stamp = stamp
            self._reload()

    def _reload(self) -> None:
        try:
            loaded = self._load()
        except Exception as error:
            # Whatever is wrong with it, the file may be right again the next time.
            log.error("the configuration file cannot be used; nothing changes", error=str(error))
            return
        if loaded == self._loaded:
            return
        for warning in loaded.warnings:
            log.warning(warning)
        before, self._loaded = self._loaded, loaded
        fields = split(before.config, loaded.config)
        if fields.restart:
            self._mailbox.put(Stop(1, f"restarting, for these fields changed: {', '.join(fields.restart)}"))
        elif loaded.config != before.config:
            log.info("the configuration has changed", fields=list(fields.live))
            self._mailbox.put(Reconfigured(loaded.config))

    def _look(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
