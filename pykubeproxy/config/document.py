"""The configuration file: parse it, with warnings, and write a Config as a file, /configz and /flagz."""

import codecs
import contextlib
import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn, cast

from pykubeproxy.config import yaml
from pykubeproxy.config.kinds import flag_text
from pykubeproxy.config.model import Config, ConfigError
from pykubeproxy.config.table import ACTIONS, SETTINGS, Setting
from pykubeproxy.wording import one_line

KIND = "KubeProxyConfiguration"
GROUP = "kubeproxy.config.k8s.io"
API_VERSION = f"{GROUP}/v1alpha1"

_FIELDS = frozenset(setting.field for setting in SETTINGS if setting.field)
_NULLABLE = frozenset(setting.field for setting in SETTINGS if setting.kind.nullable)
_SECTIONS = frozenset(field[:at] for field in _FIELDS for at, letter in enumerate(field) if letter == ".")
_MAX_SHOWN = 80
# A line without content: blank, a comment, or the mark of a document's start or end.
_NOTHING = re.compile(r"(---|\.\.\.)?\s*(#.*)?")
# The field of each flag that kube-proxy completes, and whether it completes an empty one too.
_COMPLETED = {
    "detect-local-mode": ("detectLocalMode", True),
    "proxy-mode": ("mode", True),
    "healthz-bind-address": ("healthzBindAddress", False),
    "metrics-bind-address": ("metricsBindAddress", False),
}
# The exact text of kube-proxy, which monitoring may match.
_WARNING = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees"
    " and is for debugging purposes only."
)


def show(value: object) -> str:
    """Return a value as messages show it: one short line."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        items = ["a list" if isinstance(item, list | tuple) else show(item) for item in value[:4]]
        return f"[{', '.join(items)}{', ...' if len(value) > 4 else ''}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    text = f'"{value}"' if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def parse(text: str | bytes) -> tuple[dict[str, object], list[str]]:
    """Return the mapping in a YAML or JSON text, and warnings about duplicate keys and further documents.

    As in kube-proxy, text that starts with a brace is JSON, and only the first YAML document counts. Raises ConfigError
    if it is neither or not a mapping.
    """
    try:
        text = text if isinstance(text, str) else _decode(text)
        read = _json if text.lstrip().startswith("{") else _yaml
        content, warnings = read(text)
    except UnicodeDecodeError:
        raise ConfigError("", "the configuration file is not UTF-8 text; save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError("", f"the configuration file is not valid YAML: {_where(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError("", f"the configuration file must hold a {KIND}, not {show(content)}")
    return content, warnings


def _decode(text: bytes) -> str:
    marks = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
    return text.decode(marks.get(text[:2], "utf-8"))


def _json(text: str) -> tuple[object, list[str]]:
    try:
        content = json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        problem = f"{error.msg}, line {error.lineno}"
    except RecursionError:
        problem = "it is nested too deeply"
    except ValueError as error:
        problem = str(error)
    else:
        duplicates: Iterable[tuple[str, ...]] = ()
        with contextlib.suppress(yaml.YAMLError):  # for JSON of numbers or text that YAML has not
            duplicates = next(yaml.documents(text)).duplicates
        return content, _duplicate_warnings(duplicates)
    raise ConfigError("", f'the configuration file starts with "{{" but is not valid JSON: {problem}')


def _yaml(text: str) -> tuple[object, list[str]]:
    text = text.removeprefix("\ufeff")
    end = yaml.end_of_first(text)
    first = next(yaml.documents(text[:end]), yaml.Document(1, None))
    line = text.count("\n", 0, end) + 1
    further = [
        number for number, rest in enumerate(text[end:].split("\n"), line) if not _NOTHING.fullmatch(rest)
    ]
    ignored = [f"The document in line {further[0]} is ignored; only the first one counts."] if further else []
    return first.content, _duplicate_warnings(first.duplicates) + ignored


def _duplicate_warnings(paths: Iterable[tuple[str, ...]]) -> list[str]:
    names = (functools.reduce(_join, path, "") for path in paths if _is_section(path[:-1]))
    return [f"The field {name} is set more than once; the last value counts." for name in names]


def _is_section(path: tuple[str, ...]) -> bool:
    return not path or ".".join(path) in _SECTIONS


def _where(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError):
        return one_line(str(error))
    problem = one_line(", ".join(filter(None, (error.context, error.problem))) or "it cannot be read")
    line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
    hint = "; put quotes around a value that ends in a colon or holds one before a space"
    return problem + line + (hint if problem.startswith("mapping values are not allowed") else "")


def _join(path: str, key: object) -> str:
    # A dot within a key must not look like one between two keys.
    is_plain = isinstance(key, str) and key.isprintable() and len(key) <= _MAX_SHOWN and "." not in key
    name = str(key) if is_plain else show(key)
    return f"{path}.{name}" if path else name


def nested(values: Mapping[str, object]) -> dict[str, object]:
    """Return values by dotted path as mappings in mappings."""
    content: dict[str, object] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        inner = content
        for section in sections:
            inner = cast("dict[str, object]", inner.setdefault(section, {}))
        inner[name] = value
    return content


def check_header(content: Mapping[str, object]) -> None:
    """Raise ConfigError unless apiVersion and kind are those of a kube-proxy configuration."""
    for field, expected in (("kind", KIND), ("apiVersion", API_VERSION)):
        # As in kube-proxy, the case of these two keys alone does not matter.
        value = next((content[key] for key in content if str(key).lower() == field.lower()), None)
        if value != expected:
            what = "is missing" if value is None else f"{show(value)} is not valid"
            raise ConfigError(field, f"{what}: must be {expected}")


def fields(content: Mapping[str, object]) -> dict[str, object]:
    """Return the values of known fields by path, without nulls that mean the default.

    Raises ConfigError if a section is not a mapping.
    """
    known = ((path, value) for path, value in _walk(content, "") if path in _FIELDS)
    return {path: value for path, value in known if value is not None or path not in _NULLABLE}


def unknown(content: Mapping[str, object]) -> list[str]:
    """Return a warning for each unknown field."""
    known = ("kind", "apiversion")
    paths = (path for path, _ in _walk(content, "") if path not in _FIELDS)
    return [_unknown(path) for path in paths if path.lower() not in known]


def _walk(content: Mapping[str, object], path: str) -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        name = _join(path, key)
        if name not in _SECTIONS:
            yield name, value
        elif isinstance(value, Mapping):
            yield from _walk(value, name)
        elif value is not None:
            raise ConfigError(name, f"{show(value)} is not valid: must be a mapping of fields")


def _unknown(path: str) -> str:
    near = _nearest(path)
    hint = f" Did you mean {near}?" if near else ""
    return f"The field {path} is unknown and ignored.{hint}"


def _nearest(path: str) -> str:
    """Return the most similar known path: the same name in another section, or a close match; "" if there is none."""
    name = path.lower().rpartition(".")[2]
    known = {field.lower(): field for field in sorted(_FIELDS | _SECTIONS)}
    elsewhere = [field for lower, field in known.items() if lower.rpartition(".")[2] == name]
    if elsewhere:
        return next((field for field in elsewhere if field.startswith("iptables.")), elsewhere[0])
    close = difflib.get_close_matches(path.lower(), known, n=1, cutoff=0.8)
    return known[close[0]] if close else ""


def configz(config: Config) -> dict[str, object]:
    """Return the content of /configz, to be encoded as JSON."""
    return {GROUP: config.document}


def document(values: Mapping[Setting, object]) -> dict[str, object]:
    """Return the KubeProxyConfiguration of values as given."""
    shown = {setting: setting.default if setting.dropped else value for setting, value in values.items()}
    fields = {
        setting.field: setting.kind.plain(value)
        for setting, value in shown.items()
        if setting.field and not (setting.omitted and value == setting.default)
    }
    return nested({"kind": KIND, "apiVersion": API_VERSION} | fields)


def dump(config: Config) -> str:
    """Return a configuration file for this Config, in YAML.

    Omits values that only flags can set: the master, a minSyncPeriod of 0, and servers turned off.
    """
    return yaml.dump(config.document)


def flag_values(flags: Mapping[str, object], config: Config) -> dict[str, str]:
    """Return each flag, sorted by name, with its value in `flags` (in the form of `load`) or its default.

    Without a configuration file, kube-proxy completes those in `_COMPLETED`.
    """
    values = {setting.flag: _flag_value(setting, flags) for setting in SETTINGS + ACTIONS if setting.flag}
    for flag, (field, completes_empty) in _COMPLETED.items():
        if not flags.get("config") and (completes_empty or values[flag]):
            values[flag] = str(config.document[field])
        elif completes_empty and flag not in flags:
            values[flag] = ""
    return dict(sorted((values | {"help": "false"}).items()))


def flagz(values: Mapping[str, str]) -> str:
    """Return the text of /flagz for the values of flags."""
    lines = (f"{name}: {value}" for name, value in values.items())
    return "\n".join(("", "kube-proxy flagz", _WARNING, *lines, ""))


def _flag_value(setting: Setting, flags: Mapping[str, object]) -> str:
    kind = setting.kind
    if setting.flag not in flags:
        return kind.text(setting.default)
    given = flag_text(kind, flags[setting.flag])
    try:
        return given if kind.textual else kind.text(kind.parse(given))
    except ValueError:
        # `load` does not check flags that a configuration file overrides.
        return given


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")
