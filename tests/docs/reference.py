"""The reference pages, made from the code. `python -m tests.docs.reference` writes them anew."""

import copy
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping

import click
import msgspec

from pykubeproxy.agent.observe import status
from pykubeproxy.agent.observe.metrics import Metrics
from pykubeproxy.cli import cleanup, main
from pykubeproxy.config import ACTIONS, SETTINGS, Setting, Zero
from pykubeproxy.config.kinds import BOOL
from pykubeproxy.inspect import render_json as render
from pykubeproxy.inspect.diff import render_json as diff
from pykubeproxy.inspect.dump import render_json as dump
from pykubeproxy.inspect.explain import render_json as explain
from pykubeproxy.inspect.preflight import render_json as preflight
from pykubeproxy.inspect.trace import render_json as trace
from pykubeproxy.lab import report
from tests.docs.pages import DOCS

_MARK = "<!-- Made by `make docs` from the code; what is written here by hand is lost. -->"
_SECTIONS = {
    "": "General",
    "clientConnection": "The API server",
    "logging": "Logging",
    "iptables": "Rules and syncs",
    "detectLocal": "Traffic of this node's pods",
    "conntrack": "Connection tracking",
    "pykubeproxy": "Beyond kube-proxy",
}
# Settings that belong to a section although their field stands at the top.
_BELONG = {
    "master": "clientConnection",
    "mode": "iptables",
    "nodePortAddresses": "iptables",
    "detectLocalMode": "detectLocal",
    "clusterCIDR": "detectLocal",
}
_ZERO = {
    Zero.COUNTS: "",
    Zero.DEFAULT_IN_FILE: "in a file, 0 or empty stands for the default",
    Zero.DEFAULT: "0 or empty stands for the default",
}
_CONFIGURATION = f"""# Configuration reference

{_MARK}

pykubeproxy reads kube-proxy's own configuration file, a `KubeProxyConfiguration` of
`kubeproxy.config.k8s.io/v1alpha1`, and takes kube-proxy's flags. What is its own stands under the key `pykubeproxy:`
of the same file.

```yaml
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clusterCIDR: 10.244.0.0/16
iptables:
  minSyncPeriod: 1s
pykubeproxy:
  iptablesBackend: auto
  dispatch: auto
```

**File and flags.** With `--config`, flags are ignored as kube-proxy ignores them, except those marked *beside a file*:
these win over the file.

**Changes.** A file that is written, or replaced by a rename, ends the agent with status 1, and the kubelet starts it
again. An updated ConfigMap does not: restart the DaemonSet (`kubectl rollout restart`), as with kube-proxy.

**Errors.** A misspelt field is a warning, as with kube-proxy; an impossible value ends the start with one line that
names the field and what it may be.

**Values.** Durations are Go's: `500ms`, `30s`, `1h30m`. Where 0 or an empty text stands for the default, the table
says so; kubeadm writes such values into its ConfigMap.

The configuration that an agent runs with is at `http://127.0.0.1:10249/configz`, its flags at `/flagz`.
`pykubeproxy run --write-config-to FILE` writes the file for a set of flags.
"""
_COMMANDS = f"""# Commands

{_MARK}

Each command's `--help`. The flags of [the configuration](configuration.md) are taken by every command that needs
them; they are left out here.

The exit status is 0 for yes, done, or no difference; 1 for no, trouble, or a difference; and 2 for a wrong command
line, with `diff` for trouble as well. Colours are for terminals only; `NO_COLOR` turns them off there too.
"""
_METRICS = f"""# Metrics

{_MARK}

At `http://127.0.0.1:10249/metrics` (`metricsBindAddress`), under kube-proxy's names, so that dashboards and alerts made
for kube-proxy go on working; what kube-proxy does not have begins with `pykubeproxy_`. A metric with labels appears
with its first sample. Times are seconds, points in time seconds since 1970. Besides these, there are the usual
`process_*` metrics.
"""
_JSON = f"""# JSON forms

{_MARK}

With `-o json`, commands print a document for programs. Each says its version, `pykubeproxy/v1`, under which keys and
reasons may be added and none changes its meaning. Where an entry has both, `reason` is a
stable word for programs and `message` the same for people. In the sketches below, a key without a value is a text, or what its name says.
"""


def configuration() -> str:
    """docs/reference/configuration.md."""
    effective = [setting for setting in SETTINGS if setting.attribute]
    parts = [_CONFIGURATION]
    for section, title in _SECTIONS.items():
        parts.append(f"## {title}\n")
        parts.extend(_entry(setting) for setting in effective if _section(setting) == section)
    parts.append("## What to do, rather than how\n\nFlags of `pykubeproxy run` that no file holds.\n")
    parts.append(_table(("flag", "meaning"), ((f"`--{it.flag}`", it.help) for it in ACTIONS)))
    parts.append("## Accepted, deprecated\n")
    replaced = ((f"`--{it.flag}`", f"`--{it.instead}`", it.help) for it in SETTINGS if it.instead)
    parts.append(_table(("flag", "use instead", "meaning"), replaced))
    parts.append(
        "## Accepted, without effect\n\nThey belong to other proxy modes, to other systems, or to Go's own logging; a"
        " file or a command line that has them is taken as it is.\n"
    )
    ignored = ((_code(it.field), _code(it.flag, "--"), it.help) for it in SETTINGS if it.ignored)
    parts.append(_table(("field", "flag", "meaning"), ignored))
    return "\n".join(parts)


def _section(setting: Setting) -> str:
    top, dot, _ = setting.field.partition(".")
    return top if dot else _BELONG.get(setting.field or setting.flag, "")


def _entry(setting: Setting) -> str:
    default = setting.kind.text(setting.default)
    facts = [
        f"flag `--{setting.flag}`" * bool(setting.flag),
        "`true` or `false`" if setting.kind is BOOL else f"`{setting.kind.name}`",
        "no default" if default in ("", "[]") else f"default `{default}`",
        "*beside a file*" * (setting.beside_config and bool(setting.field)),
        _ZERO[setting.zero] * (default not in ("", "[]")),
    ]
    told = " · ".join(fact for fact in facts if fact)
    return f"### `{setting.field or f'--{setting.flag}'}`\n\n{setting.help}\n\n{told}\n"


def commands() -> str:
    """docs/reference/commands.md."""
    parts = [_COMMANDS]
    for path, command in _all(main, ("pykubeproxy",)):
        parts.append(f"## {' '.join(path)}\n")
        parts.append(f"```text\n{_help(path, command)}\n```\n")
    return "\n".join(parts)


def _all(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _all(command, (*path, name))


def _help(path: tuple[str, ...], command: click.Command) -> str:
    """The help of a command, without the flags of the configuration."""
    hidden = [
        it for it in command.params if isinstance(it, click.Option) and it.name in _flags() and not it.hidden
    ]
    for parameter in hidden:
        parameter.hidden = True
    command = copy.copy(command)
    command._help_option = None  # click keeps the one of who asked first, who may have been another test
    try:
        context = click.Context(
            command, info_name=" ".join(path), terminal_width=100, help_option_names=["-h", "--help"]
        )
        return command.get_help(context)
    finally:
        for parameter in hidden:
            parameter.hidden = False


def _flags() -> set[str]:
    return {f"flag_{setting.flag.replace('-', '_')}" for setting in SETTINGS if setting.flag}


def metrics() -> str:
    """docs/reference/metrics.md."""
    found = [it for it in Metrics(lambda _: 0).registry.collect() if not it.name.startswith("process_")]
    parts = [_METRICS]
    for kind, metrics in itertools.groupby(
        sorted(found, key=lambda it: (it.type, it.name)), lambda it: it.type
    ):
        rows = (
            (f"`{it.name}{'_total' * (kind == 'counter')}`", _labels(it.name), it.documentation + ".")
            for it in metrics
        )
        parts.append(f"## {kind.capitalize()}s\n")
        parts.append(_table(("name", "labels", "meaning"), rows))
    return "\n".join(parts)


def _labels(name: str) -> str:
    """The labels of a metric, from the registry's own record of it."""
    metric = Metrics(lambda _: 0).registry._names_to_collectors.get(name)
    labels: Iterable[str] = getattr(metric, "_labelnames", ())
    return ", ".join(f"`{label}`" for label in labels)


def json_forms() -> str:
    """docs/reference/json.md, from where each form is made."""
    parts = [_JSON]
    for command, make in _FORMS.items():
        parts.append(f"## {command}\n")
        parts.extend(_paragraph(it) for it in (inspect.getdoc(make) or "").split("\n\n"))
    parts.append("## status\n")
    parts.extend(_paragraph(it) for it in (inspect.getdoc(status.Status) or "").split("\n\n"))
    parts.append(f"```text\n{_sketch(status.Status)}\n```\n")
    return "\n".join(parts)


_FORMS: dict[str, Callable[..., object]] = {
    "dump-rules": dump.document,
    "explain": explain.document,
    "diff": diff.document,
    "trace": trace.document,
    "check": preflight.document,
    "render": render.document,
    "cleanup": cleanup.document,
    "lab demo": report.demo_document,
    "lab demo --list": report.list_document,
    "lab up, lab status": report.status_document,
    "lab down": report.down_document,
}


def _paragraph(text: str) -> str:
    if text.startswith("{"):
        return f"```text\n{text}\n```\n"
    return re.sub(r"`(\w+)`", lambda found: f"`{_camel(found[1])}`", text) + "\n"


def _camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda found: found[1].upper(), name)


def _sketch(kind: object, indent: str = "") -> str:
    """What a value of this type looks like as JSON."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        inner = indent + "  "
        fields = (
            f'{inner}"{it.encode_name}": {_sketch(it.type, inner)}' for it in msgspec.structs.fields(kind)
        )
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}"
    if origin is tuple or origin is list:
        return f"[{_sketch(arguments[0], indent)}]"
    if origin in (dict, Mapping):
        return f"{{{_sketch(arguments[0], indent)}: {_sketch(arguments[1], indent)}}}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_sketch(it, indent) for it in arguments)
    return _WORDS.get(kind, "text")


_WORDS: dict[object, str] = {int: "number", float: "number", bool: "true or false", type(None): "null"}


def _code(text: str, prefix: str = "") -> str:
    return f"`{prefix}{text}`" if text else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", r"\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "commands.md": commands,
    "metrics.md": metrics,
    "json.md": json_forms,
}


def write() -> None:
    """Write all reference pages."""
    (DOCS / "reference").mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (DOCS / "reference" / name).write_text(make())


if __name__ == "__main__":
    write()
