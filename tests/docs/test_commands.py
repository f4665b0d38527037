"""What the documentation shows and cannot run here is right as far as it can be told: commands, files, YAML."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import yaml
from markdown.extensions.toc import slugify

from pykubeproxy.cli import main
from pykubeproxy.config import load
from pykubeproxy.config.document import KIND
from tests.docs.pages import ROOT, Block, blocks, commands, name, pages

LANGUAGES = {"console", "sh", "yaml", "json", "text", "toml", "python", "diff"}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# Commands that take a folder or file of this project.
PATHS = re.compile(r"^(manifests|vagrant|docs|tests|pykubeproxy)/")

every_page = pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in pages()])


def wrong_option(words: list[str]) -> str:
    """The command or option of `pykubeproxy ...` that there is not, or nothing."""
    command: click.Command = main
    context = click.Context(main)
    for word in words[1:]:
        if word == "--":
            break
        if isinstance(command, click.Group) and not word.startswith("-"):
            inner = command.get_command(context, word)
            if inner is None:
                return word
            command = inner
        elif re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options(command):
            return word
    return ""


def options(command: click.Command) -> set[str]:
    """What a command takes that begins with a dash."""
    return {"-h", "--help", "-v=2", *(opt for parameter in command.params for opt in parameter.opts)}


def wrong_target(words: list[str]) -> str:
    """The target of `make ...` that there is not, or nothing."""
    targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    return next((word for word in targets if word not in TARGETS), "")


def wrong_path(words: list[str]) -> str:
    """The file or folder of this project that there is not, or nothing."""
    return next((word for word in words if PATHS.match(word) and not (ROOT / word).exists()), "")


CHECKS: dict[str, Callable[[list[str]], str]] = {"pykubeproxy": wrong_option, "make": wrong_target}


def wrong_command(words: list[str]) -> str:
    """What is wrong with a command, or with the one that it passes on behind a "--"."""
    inner = words[words.index("--") + 1 :] if "--" in words[:-1] else []
    for given in (words, inner):
        check = CHECKS.get(given[0].rpartition("/")[2]) if given else None
        if check and (wrong := check(given)):
            return wrong
    return ""


def shown(block: Block) -> Iterator[list[str]]:
    """The commands that a block shows and nothing runs."""
    if block.language == "sh":
        yield from commands(block.text)
    elif block.language == "yaml":
        for found in re.findall(r"pykubeproxy (?:[a-z]|-)[^\n\"']*", block.text):
            yield from commands(found)


@every_page
def test_commands_are_there(page: Path) -> None:
    """Each command and option of ours, each target of make and each path of the project exists."""
    for block in blocks(page):
        for words in shown(block):
            wrong = wrong_command(words) or wrong_path(words)
            assert not wrong, f"{name(page)}:{block.line}: {wrong!r} in {' '.join(words)}"


@every_page
def test_blocks_are_of_a_known_kind(page: Path) -> None:
    """A `console` block is run, an `sh` block is for a cluster; another word would be neither by oversight."""
    assert {block.language for block in blocks(page)} <= LANGUAGES


@every_page
def test_documents_are_valid(page: Path) -> None:
    """YAML can be read, and a configuration file is one that the agent takes without a warning."""
    for block in blocks(page):
        if block.language == "yaml":
            for document in yaml.safe_load_all(block.text):
                if isinstance(document, dict) and document.get("kind") == KIND:
                    loaded = load(yaml.safe_dump(document).encode(), {})
                    assert not loaded.warnings, f"{name(page)}:{block.line}"


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in sorted(ROOT.glob("*.md"))])
def test_links_lead_somewhere(page: Path) -> None:
    """Those of the pages beside the code; for the others the building of the site makes sure."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" not in target and not target.startswith("mailto:"):
            assert (ROOT / path).exists(), target
            headings = re.findall(r"^#+ (.*)$", (ROOT / (path or page)).read_text(), re.MULTILINE)
            assert not anchor or anchor in {slugify(heading, "-") for heading in headings}, target
