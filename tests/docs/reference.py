"""The generated parts of the documentation: reference pages, JSON Schemas and pictures, from the code.

`tests/docs/hooks.py` inserts them while MkDocs builds the site. They are not in git.
"""

import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator

import click

from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.bundle import layout
from pykubeproxy.cli import main
from pykubeproxy.cli.flags import topic_of
from pykubeproxy.cli.help import Topic
from pykubeproxy.cli.kubectl import plugin
from pykubeproxy.config import ACTIONS, SETTINGS, Setting
from pykubeproxy.config.kinds import BOOL
from pykubeproxy.config.table import Zero
from pykubeproxy.inspect.connection import TracedDestination
from pykubeproxy.inspect.trace.svg import svg
from pykubeproxy.report.document import Report
from pykubeproxy.services.ports import FrontendKind
from tests.docs import json_reference
from tests.fakes.three_nodes import ThreeNodes

_ZERO = {
    Zero.COUNTS: "",
    Zero.DEFAULT_IN_FILE: "in a file, {} means the default",
    Zero.DEFAULT: "{} means the default",
}


def settings() -> str:
    """Return the settings and flags, by topic."""
    effective = [setting for setting in SETTINGS if setting.attribute]
    parts: list[str] = []
    for topic in Topic:
        if entries := [_entry(setting) for setting in effective if topic_of(setting) is topic]:
            parts += [f"## {topic}\n", *entries]
    parts.append("## Flags without a field\n\nOnly `pykubeproxy run` has these flags.\n")
    actions = ((f"`--{setting.flag}`", setting.help) for setting in ACTIONS)
    parts.append(_table(("flag", "meaning"), actions))
    parts.append("## Deprecated flags\n")
    deprecated = [setting for setting in SETTINGS if setting.instead]
    replaced = ((f"`--{setting.flag}`", f"`--{setting.instead}`", setting.help) for setting in deprecated)
    parts.append(_table(("flag", "use instead", "meaning"), replaced))
    parts.append(
        "## Settings without effect\n\nThese settings belong to other proxy modes, other operating systems or Go's"
        " logging. pykubeproxy accepts and ignores them.\n"
    )
    without_effect = [setting for setting in SETTINGS if setting.ignored]
    ignored = ((_code(setting.field), _code(setting.flag, "--"), setting.help) for setting in without_effect)
    parts.append(_table(("field", "flag", "meaning"), ignored))
    return "\n".join(parts)


def _entry(setting: Setting) -> str:
    default = setting.kind.text(setting.default)
    facts = [
        f"flag `--{setting.flag}`" * bool(setting.flag),
        "`true` or `false`" if setting.kind is BOOL else f"`{setting.kind.name}`",
        "no default" if default in ("", "[]") else f"default `{default}`",
        "*also with a file*" * setting.beside_config,
        "*an invalid value is a warning*" * setting.optional,
        _ZERO[setting.zero].format("empty" if setting.kind.textual else "0") * (default not in ("", "[]")),
    ]
    line = " · ".join(fact for fact in facts if fact)
    return f"### `{setting.field or f'--{setting.flag}'}`\n\n{setting.help}\n\n{line}\n"


def commands() -> str:
    """Return the help of each command."""
    parts: list[str] = []
    programs = (walk(main, ("pykubeproxy",)), walk(plugin, ("kubectl", "pykubeproxy")))
    for path, command in itertools.chain(*programs):
        parts.append(f"## {' '.join(path)}\n")
        parts.append(f"```text\n{_help(path, command)}\n```\n")
    return "\n".join(parts)


def walk(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the path and the object of each command of a group, and of its groups."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))


def _help(path: tuple[str, ...], command: click.Command) -> str:
    """Return the help of a command."""
    command = copy.copy(command)
    command._help_option = None  # click caches the option of the first caller, which may be another test
    context = command.context_class(
        command, info_name=" ".join(path), terminal_width=100, help_option_names=["-h", "--help"]
    )
    return command.get_help(context)


def metrics() -> str:
    """Return the tables of metrics, by type."""
    families = Metrics(lambda _: 0).registry.collect()
    ours = sorted(
        (metric for metric in families if not metric.name.startswith("process_")),
        key=lambda metric: (metric.type, metric.name),
    )
    parts: list[str] = []
    for kind, metrics in itertools.groupby(ours, lambda metric: metric.type):
        suffix = "_total" if kind == "counter" else ""
        rows = (
            (f"`{metric.name}{suffix}`", _labels(metric.name), f"{metric.documentation}.")
            for metric in metrics
        )
        parts.append(f"## {kind.capitalize()}s\n")
        parts.append(_table(("name", "labels", "meaning"), rows))
    return "\n".join(parts)


def _labels(name: str) -> str:
    """Return the labels of a metric; only the registry's private record has them before the first sample."""
    metric = Metrics(lambda _: 0).registry._names_to_collectors.get(name)
    labels: Iterable[str] = getattr(metric, "_labelnames", ())
    return ", ".join(f"`{label}`" for label in labels)


def reports() -> str:
    """Return the kinds of JSON documents, from the types of reports."""
    return "\n".join(json_reference.pages())


def bundle_files() -> str:
    """Return the table of the files in a bundle."""
    rows = ((f"`{name}`", f"{text[0].upper()}{text[1:]}.") for name, text in layout.FILES.items())
    return _table(("file", "what it holds"), rows)


def bundle_manifest() -> str:
    """Return the keys of a bundle's manifest."""
    return "\n".join(json_reference.section(layout.Manifest))


def _code(text: str, prefix: str = "") -> str:
    return f"`{prefix}{text}`" if text else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", r"\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def traced_path() -> str:
    """Return the picture of a pod that connects to a Service of which it is an endpoint."""
    to = TracedDestination("TCP", "10.96.1.1", 80, "ns1/web:http", FrontendKind.CLUSTER_IP)
    return svg(ThreeNodes("clusterip-three").trace("10.244.1.11", to), wide=False)


def _schema(report: type[Report]) -> str:
    return json.dumps(json_reference.schema(report), indent=2, ensure_ascii=False) + "\n"


# The parts of pages, by the name in their marker `<!-- generated: NAME -->`.
PARTS: dict[str, Callable[[], str]] = {
    "settings": settings,
    "commands": commands,
    "metrics": metrics,
    "reports": reports,
    "bundle files": bundle_files,
    "bundle manifest": bundle_manifest,
}
# Whole files, by their path in docs/.
FILES: dict[str, Callable[[], str]] = {
    "assets/trace.svg": traced_path,
    **{
        f"reference/schemas/{json_reference.kind_of(report)}.json": functools.partial(_schema, report)
        for report in json_reference.REPORTS
    },
}
