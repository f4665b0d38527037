"""The version is the same wherever it stands, and the changelog has the form of Keep a Changelog."""

import re
from pathlib import Path

import yaml

import pykubeproxy

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def test_the_manifests_ask_for_this_version() -> None:
    """The image's tag is the version of the program."""
    content = yaml.safe_load((ROOT / "manifests" / "base" / "kustomization.yaml").read_text())
    assert [image["newTag"] for image in content["images"]] == [pykubeproxy.__version__]


def test_the_changelog_has_its_form() -> None:
    """Versions from the newest on, each with its date, and under them only the sections that there are."""
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
    """Under a section stand entries, each one a sentence of its own."""
    for entry in re.findall(r"^- (.*(?:\n  .*)*)", CHANGELOG, re.MULTILINE):
        assert entry.endswith("."), entry
