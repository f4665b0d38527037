"""pre-commit runs the tools of `make lint`."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def test_hooks_are_make_lint() -> None:
    """The commands are the same, and no hook downloads anything."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    (recipe,) = re.findall(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert entries == [command.rpartition("xargs ")[2] for command in commands]
