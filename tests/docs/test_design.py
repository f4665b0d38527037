"""What docs/design.md names exists in the code, so that a rename cannot leave the page behind."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache

import pytest

from tests.docs.pages import DOCS, ROOT

PACKAGE = ROOT / "pykubeproxy"
PAGE = (DOCS / "design.md").read_text()


def members(found: ast.ClassDef) -> Iterator[str]:
    """The names of methods and fields of a class."""
    for node in found.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def defined(module: ast.Module) -> Iterator[str]:
    """The names that a module defines; those of members as Class.member."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{member}" for member in members(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@cache
def names() -> Mapping[str, set[str]]:
    """The modules that define each name."""
    found = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in defined(ast.parse(path.read_text())):
            found[name].add(str(path.relative_to(PACKAGE)))
    return found


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(\w+/[\w/]+\.py)`", PAGE))))
def test_modules_exist(path: str) -> None:
    assert (PACKAGE / path).exists() or (ROOT / path).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([A-Z]\w*\.[a-z]\w*)`", PAGE))))
def test_methods_and_fields_exist(name: str) -> None:
    assert name in names()


@pytest.mark.parametrize(
    ("name", "path"), sorted(set(re.findall(r"`([\w.]+)`\s+\(`(\w+/[\w/]+\.py)`", PAGE)))
)
def test_names_are_defined_in_the_modules_beside_them(name: str, path: str) -> None:
    assert path in names()[name.removeprefix("coverage.").removeprefix("wire.")]


@pytest.mark.parametrize("package", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_every_package_is_in_the_table(package: str) -> None:
    assert f"| `{package}/` |" in PAGE
