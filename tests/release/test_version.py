"""Versions agree, and the changelog has the format of Keep a Changelog."""

import re
from pathlib import Path

import yaml

import pykubeproxy

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_manifests_use_this_version() -> None:
    """The image tag is the version of the package."""
    content = yaml.safe_load((ROOT / "manifests" / "base" / "kustomization.yaml").read_text())
    assert [image["newTag"] for image in content["images"]] == [pykubeproxy.__version__]


def test_changelog_format() -> None:
    """Versions are sorted, newest first, with dates and only known sections."""
    first, *others = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", other) for other in others]
    assert all(found), others
    versions = [(tuple(map(int, it.groups()[:3])), it[4]) for it in found if it]
    assert versions == sorted(versions, reverse=True)
    for part in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert sections == [name for name in SECTIONS if name in sections], "each once, in this order"


def test_every_entry_is_a_sentence() -> None:
    """Every entry ends with a period."""
    for entry in re.findall(r"^- (.*(?:\n  .*)*)", CHANGELOG, re.MULTILINE):
        assert entry.endswith("."), entry
