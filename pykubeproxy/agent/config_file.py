"""End the process when the content of the configuration file changes in place, as kube-proxy does."""

import time
from collections.abc import Callable
from pathlib import Path

from pykubeproxy.agent.mailbox import Stop

# A look each second instead of inotify: pyroute2's Inotify ignores errors, and inotify misses a replaced file.
_PERIOD = 1.0


class ConfigFileWatch:
    """Watch the configuration file at `path`.

    A file with another content, or replaced by a rename, ends the process. A ConfigMap update does not: the kubelet swaps
    the symbolic link `..data`, so the path resolves to another file. A removed or moved file has no effect, since a
    restart would fail.
    """

    name = "config-file"

    def __init__(self, path: str, post: Callable[[Stop], None]) -> None:
        self._path = path
        self._post = post
        self._seen = self._look()

    def run(self) -> None:
        """Return after the first change, with a Stop posted."""
        while not self.changed():
            time.sleep(_PERIOD)
        self._post(Stop(1, f"configuration file {self._path} was updated"))

    def changed(self) -> bool:
        """Return whether the file was written or replaced since the last call."""
        seen, before = self._look(), self._seen
        self._seen = seen or before
        return bool(seen and before and seen[0] == before[0] and seen != before)

    def _look(self) -> tuple[Path, int, bytes] | None:
        """Return the file that the path resolves to, with its inode and content; None if there is none."""
        try:
            target = Path(self._path).resolve(strict=True)
            return target, target.stat().st_ino, target.read_bytes()
        except OSError:
            return None
