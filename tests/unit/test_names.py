"""Each class name of the product stands for one idea, and each variable has a name.

A private class counts too, without its underscore: a reader who meets `_Port` thinks of `Port`.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pykubeproxy

_PRODUCT = Path(pykubeproxy.__file__).parent


def _nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(_PRODUCT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            yield str(path.relative_to(_PRODUCT)), node


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in _nodes():
        if isinstance(node, ast.ClassDef):
            places[node.name.lstrip("_")].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_variable_is_named_it() -> None:
    named = [
        f"{path}:{node.lineno}"
        for path, node in _nodes()
        if (isinstance(node, ast.arg) and node.arg == "it")
        or (isinstance(node, ast.Name) and node.id == "it" and isinstance(node.ctx, ast.Store))
    ]
    assert named == []
