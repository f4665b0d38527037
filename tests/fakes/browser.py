"""Headless Chromium, if it is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(_CHROMIUM is None, reason="needs chromium")


def browse(folder: Path, url: str, *flags: str) -> str:
    """Open a page with Chromium and return what it prints. The browser keeps its files in the folder."""
    command = (
        *(str(_CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *(
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
        ),
        *(f"--user-data-dir={folder / 'profile'}", *flags, url),
    )
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
