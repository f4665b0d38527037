"""The pages show nothing as published that is not: neither a package nor an image."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name, pages

# No package index has the program.
INSTALL = re.compile(
    r"(?:pip|pipx|uv|uvx|brew|apt|apt-get|helm)\b[^\n`]*\binstall\b[^\n`/]*\bpykubeproxy\b(?![/-])"
)
IMAGE = re.compile(r"[\w./-]*\bpykubeproxy:[\d$]\S*")
# OWNER is a placeholder that no registry accepts; localhost is this machine.
PLACES = ("registry.example.com/OWNER/", "ghcr.io/OWNER/", "localhost/")
FILES = [*pages(), *sorted((ROOT / "manifests").rglob("*.yaml")), *sorted((ROOT / "vagrant").glob("*.sh"))]


def claims(text: str) -> list[str]:
    """Return what a text shows as if it could be installed or pulled."""
    images = [found for found in IMAGE.findall(text) if not found.lstrip("/").startswith(PLACES)]
    return INSTALL.findall(text) + images


@pytest.mark.parametrize("file", FILES, ids=name)
def test_nothing_is_shown_as_published(file: Path) -> None:
    assert claims(file.read_text()) == []
