"""YAML as Kubernetes objects are written in it: the core schema of YAML 1.2.

There `on`, `off`, `yes` and `no` are strings, a time stamp is a string, 010 is ten, and 1:30 is no number.
"""

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import yaml

from pykubeproxy.config import expansion

# The one in C is ten times as fast; PyYAML can be built without it.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,18}|0o[0-7]{1,20}|0x[0-9a-fA-F]{1,15}", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), _first)


def _int(loader: Any, node: Any) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def documents(text: bytes) -> Iterator[tuple[int, object]]:
    """Each document with the number of its first line, as dicts, lists, strings and numbers.

    Raises yaml.YAMLError for text that is no YAML, and for one that would come to too much.
    """
    expansion.check(yaml.parse(text, Loader=_Loader))
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            yield node.start_mark.line + 1, _constructed(loader, node)
    finally:
        loader.dispose()


def _constructed(loader: Any, node: Any) -> object:
    try:
        return loader.construct_document(node)
    except yaml.YAMLError:
        raise
    except Exception as error:
        # A value that does not fit an explicit tag, such as !!bool or !!timestamp, makes PyYAML raise nearly anything.
        raise yaml.MarkedYAMLError(
            problem=f"a value does not fit: {error}", problem_mark=node.start_mark
        ) from None
