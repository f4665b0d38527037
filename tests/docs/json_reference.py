"""The reference of JSON documents and their JSON Schemas, from the types of reports."""

import enum
import inspect
import re
import types
import typing
from collections.abc import Iterator, Mapping

import msgspec

from pykubeproxy import API_VERSION
from pykubeproxy.inspect.check.report import CheckReport
from pykubeproxy.inspect.cleanup import CleanupReport
from pykubeproxy.inspect.diff.report import DiffReport
from pykubeproxy.inspect.dump.render_rules import RenderReport
from pykubeproxy.inspect.dump.report import DumpReport
from pykubeproxy.inspect.explain.report import ExplainReport
from pykubeproxy.inspect.status import StatusReport
from pykubeproxy.inspect.trace.live import LiveTraceReport
from pykubeproxy.inspect.trace.report import TraceReport
from pykubeproxy.lab.report import DemoReport, LabReport, LabsReport, ScenariosReport
from pykubeproxy.report.document import Report
from tests.docs.json_examples import examples

# The reports, and the commands that print them.
REPORTS: dict[type[Report], str] = {
    StatusReport: "`pykubeproxy status`, `kubectl pykubeproxy status`",
    CheckReport: "`pykubeproxy check`, `kubectl pykubeproxy check`",
    DumpReport: "`pykubeproxy dump-rules`, `kubectl pykubeproxy dump-rules`",
    ExplainReport: "`pykubeproxy explain`, `kubectl pykubeproxy explain`",
    DiffReport: "`pykubeproxy diff`, `kubectl pykubeproxy diff`",
    TraceReport: "`pykubeproxy trace`, `kubectl pykubeproxy trace`",
    LiveTraceReport: "`pykubeproxy trace --live`, `kubectl pykubeproxy trace --live`",
    RenderReport: "`pykubeproxy render`",
    CleanupReport: "`pykubeproxy cleanup`",
    LabReport: "`pykubeproxy lab up`, `pykubeproxy lab status`",
    LabsReport: "`pykubeproxy lab list`",
    DemoReport: "`pykubeproxy lab demo`",
    ScenariosReport: "`pykubeproxy lab demo --list`",
}
_FIELD = re.compile(r"- ((?:`\w+`(?:, )?)+): (.*)")
# Keys that mean the same in all reports. Docstrings describe the others, and where such a key means more.
_COMMON = {
    "address": "an IP address",
    "chain": "the name of the chain",
    "endpoint": '"ip:port"',
    "family": "the IP family",
    "message": "what is the case, for people",
    "name": "its name",
    "namespace": "the namespace of the Service",
    "node": "the name of the node",
    "nodes": "the nodes for which this holds",
    "policy": '"Cluster" or "Local"',
    "port": 'the name of the port, "" if it has none',
    "protocol": '"TCP", "UDP" or "SCTP"',
    "share": "the share of new connections, 0 to 1",
    "table": '"filter", "nat" or "mangle"',
    "verdict": "what rules do with a new connection",
}
_NAMES: dict[object, str] = {
    str: "string",
    int: "number",
    float: "number",
    bool: "true or false",
    type(None): "null",
}


def pages() -> Iterator[str]:
    """Yield the sections of the reference: each report, and each type below the first report that holds it."""
    described: set[type[msgspec.Struct]] = set()
    shown = examples()
    for report, commands in REPORTS.items():
        kind = kind_of(report)
        schema_link = f"[JSON Schema](schemas/{kind}.json)"
        yield f"## {kind}\n\nPrinted by {commands}. {_summary(report)} {schema_link}.\n\n{_fields(report)}"
        command, text = shown[kind]
        summary = f"<summary>Example: <code>pykubeproxy {command} -o json</code></summary>"
        yield f'<details markdown="1">\n{summary}\n\n```json\n{text}\n```\n\n</details>\n'
        for held in [held for held in _structs(report) if held not in {report, *described}]:
            described.add(held)
            yield f"### {held.__name__}\n\n{_summary(held)}\n\n{_fields(held)}"


def section(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield the reference of a struct and of those in it."""
    for held in _structs(kind):
        heading = "" if held is kind else f"### {held.__name__}\n\n"
        yield f"{heading}{_summary(held)}\n\n{_fields(held)}"


def kind_of(report: type[Report]) -> str:
    """Return the value of `kind`."""
    return str(report.__struct_config__.tag)


def schema(report: type[Report]) -> dict[str, object]:
    """Return the JSON Schema of a report, with the meanings of its fields."""
    _, components = msgspec.json.schema_components(
        [report], schema_hook=lambda _: {"type": "string"}, ref_template="#/$defs/{name}"
    )
    by_name = {entry.__name__: entry for entry in _structs(report)}
    for name, definition in components.items():
        if name in by_name:
            _describe(by_name[name], definition)
    top = components.pop(report.__name__)
    version = {"const": API_VERSION}
    top["properties"] = {"apiVersion": version, **top["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": components}


def _describe(kind: type[msgspec.Struct], definition: dict[str, typing.Any]) -> None:
    definition["description"] = _summary(kind)
    meanings = _meanings(kind)
    for field in msgspec.structs.fields(kind):
        definition["properties"][field.encode_name]["description"] = meanings[field.name]


def _structs(kind: object) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs in a type, each once."""
    known: dict[type[msgspec.Struct], None] = {}

    def visit(one: object) -> None:
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            if one in known:
                return
            known[one] = None
            for field in msgspec.structs.fields(one):
                visit(field.type)
        for argument in typing.get_args(one):
            visit(argument)

    visit(kind)
    return iter(known)


def _fields(kind: type[msgspec.Struct]) -> str:
    """Return the table of a type's fields."""
    meanings = _meanings(kind)
    rows = ["| key | value | meaning |", "| --- | --- | --- |"]
    for field in msgspec.structs.fields(kind):
        rows.append(f"| `{field.encode_name}` | {_type(field.type)} | {meanings[field.name]} |")
    return "\n".join(rows) + "\n"


def _type(kind: object) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(f'"{entry.value}"' for entry in kind)
    if origin in (tuple, list, frozenset) or (
        isinstance(origin, type) and issubclass(origin, typing.Sequence)
    ):
        return f"list of {_type(arguments[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"{_type(arguments[1])} by {_type(arguments[0])}"
    if origin is typing.Literal:
        return ", ".join(f'"{entry}"' for entry in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(entry) for entry in arguments)
    return _NAMES.get(kind, "string")


def _summary(kind: type) -> str:
    """Return the docstring without the meanings of fields, on one line."""
    text = inspect.getdoc(kind) or ""
    paragraphs = [entry for entry in text.split("\n\n") if not entry.startswith("- `")]
    return " ".join(" ".join(paragraphs).split())


def _meanings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the meaning of each field: from its line in the docstring, from those of all reports, or from its type."""
    described = _described(kind)
    found: dict[str, str] = {}
    for field in msgspec.structs.fields(kind):
        text = described.get(field.name, "")
        held = next(_structs(field.type), None)
        if not text or re.sub(r"\W|or", "", text) == re.sub(r"\W", "", _type(field.type)):
            text = _COMMON.get(field.name, "")
            if field.name == "port" and field.type is int:
                text = "the number of the port"
            elif held and not text:
                summary = _summary(held).partition(". ")[0].rstrip(".")
                text = "each: " * (held is not field.type) + summary[0].lower() + summary[1:]
        assert text, f"{kind.__name__} does not say what `{field.name}` is"
        found[field.name] = text
    return found


def _described(kind: type) -> dict[str, str]:
    """Return the meanings of fields, from the lines "- `field`: meaning" of the docstring."""
    found: dict[str, str] = {}
    for item in re.split(r"\n(?=- )", inspect.getdoc(kind) or ""):
        text = " ".join(item.split("\n\n")[-1 if item.startswith("-") is False else 0].split())
        if match := _FIELD.match(text):
            for name in re.findall(r"`(\w+)`", match[1]):
                found[name] = match[2]
    return found
