"""Documents: a report as JSON or YAML, made from its type alone."""

import json
from collections.abc import Iterable

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.report.text import Block


def _kind(name: str) -> str:
    return name.removesuffix("Report")


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="kind", tag=_kind):
    """An answer of a command.

    Its fields are the document of `-o json` and `-o yaml`, with names in camelCase and the class name without "Report" as
    `kind`. Docstrings say what fields hold, in lines such as "- `field`: meaning"; the reference and the JSON Schemas show
    them. A field that is not known is null, not missing.
    """

    def blocks(self, *, wide: bool) -> Iterable[Block]:
        """Return the blocks of the text; `wide` is that of `-o wide`, with more columns or details."""
        raise NotImplementedError

    def names(self) -> Iterable[str]:
        """Return the names for `-o name`, such as "node/node1"."""
        raise NotImplementedError


def document(report: Report) -> dict[str, object]:
    """Return a report as built-in types, with its API version first."""
    fields = msgspec.to_builtins(report, enc_hook=_plain, str_keys=True)
    return {"apiVersion": API_VERSION, "kind": fields.pop("kind"), **fields}


def json_text(found: object) -> str:
    """Return a document as indented JSON in printable characters."""
    try:
        text = msgspec.json.format(msgspec.json.encode(found, enc_hook=_plain)).decode()
    except UnicodeEncodeError:  # a byte that is not UTF-8
        text = json.dumps(msgspec.to_builtins(found, enc_hook=_plain), indent=2, ensure_ascii=False)
    lines = (
        "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in line)
        for line in text.split("\n")
    )
    return "\n".join(lines) + "\n"


def yaml_text(found: object) -> str:
    """Return a document as YAML in printable characters."""
    import yaml  # takes 20 ms

    text = yaml.dump(found, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, width=120)
    return str(text)


def _plain(value: object) -> object:
    """Return a value of another type as text, such as a network or a path."""
    return str(value)
