"""A ConfigMap volume as the kubelet mounts and updates it."""

import shutil
from pathlib import Path


class ConfigMapVolume:
    """A folder with config.conf, a symbolic link by way of the symbolic link ..data."""

    def __init__(self, folder: Path, text: str) -> None:
        self._folder = folder
        self._version = 0
        self.path = folder / "config.conf"
        folder.mkdir()
        self.update(text)
        self.path.symlink_to("..data/config.conf")

    def update(self, text: str) -> None:
        """Write a new version, swap ..data and remove the old version."""
        self._version += 1
        version = self._folder / f"..{self._version}"
        version.mkdir()
        (version / "config.conf").write_text(text)
        (self._folder / "..data_tmp").symlink_to(version.name)
        (self._folder / "..data_tmp").rename(self._folder / "..data")
        shutil.rmtree(self._folder / f"..{self._version - 1}", ignore_errors=True)
