"""The configuration file: its text, and what in it is out of place."""

import difflib
from collections.abc import Iterator, Mapping

import yaml

from pykubeproxy.config import expansion
from pykubeproxy.config.model import ConfigError
from pykubeproxy.config.table import SETTINGS

KIND = "KubeProxyConfiguration"
GROUP = "kubeproxy.config.k8s.io"
API_VERSION = f"{GROUP}/v1alpha1"

_FIELDS = frozenset(setting.field for setting in SETTINGS if setting.field)
_SECTIONS = frozenset(field[:at] for field in _FIELDS for at, letter in enumerate(field) if letter == ".")
_LONGEST_SHOWN = 80


class _Loader(yaml.SafeLoader):
    """Values as YAML 1.1 has them, except that what looks like a date is text.

    The loader written in C is not used: it recurses on the machine stack, and some 30,000 opening brackets
    end the process (PyYAML 6.0.3). This one raises RecursionError, and a file of a hundred lines takes
    milliseconds.
    """


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def show(value: object) -> str:
    """A value as a message shows it: on one line, never long."""
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
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."


def parse(text: str | bytes) -> tuple[dict[str, object], list[str]]:
    """The mapping in a YAML or JSON text, and a warning for each key that stands twice in it.

    Raises ConfigError if it is not YAML or not a mapping.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text.removeprefix("\ufeff")
        expansion.check(yaml.parse(text, Loader=_Loader))
        loader = _Loader(text)
        node = _only_document(loader)
        twice = [_twice(path) for path in _duplicates(node)]
        content = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise ConfigError("", f"the configuration file is not valid YAML: {_where(error)}") from None
    except RecursionError:
        raise ConfigError("", "the configuration file is not usable: it is nested too deeply") from None
    except UnicodeDecodeError:
        raise ConfigError("", "the configuration file is not usable: it is not UTF-8 text") from None
    # Explicit tags such as "!!int x" make the loader trip over whatever its conversion raises.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError("", f"the configuration file is not valid YAML: {_one_line(str(error))}") from None
    if not isinstance(content, dict):
        raise ConfigError("", f"the configuration file must hold a {KIND}, not {show(content)}")
    return content, twice


def _only_document(loader: _Loader) -> yaml.Node | None:
    """The first document, None if it is empty. Only empty ones may follow, such as after a last "---"."""
    node = loader.get_node() if loader.check_node() else None
    while loader.check_node():
        more = loader.get_node()
        if more and not (isinstance(more, yaml.ScalarNode) and not more.value):
            expected = "expected a single document in the stream"
            raise yaml.MarkedYAMLError(expected, None, "but found another document", more.start_mark)
    return node


def _twice(path: str) -> str:
    return f"The field {path} stands more than once; the last one counts."


def _where(error: yaml.MarkedYAMLError) -> str:
    problem = _one_line(", ".join(filter(None, (error.context, error.problem))) or "it cannot be read")
    line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
    hint = "; put quotes around a value that ends in a colon or holds one before a space"
    return problem + line + (hint if problem.startswith("mapping values are not allowed") else "")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _duplicates(node: yaml.Node | None, path: str = "") -> Iterator[str]:
    """The paths of the keys that stand twice, among the sections that have settings."""
    if not isinstance(node, yaml.MappingNode) or (path and path not in _SECTIONS):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            name = _join(path, key.value)
            if name in seen:
                yield name
            seen.add(name)
            yield from _duplicates(value, name)


def _join(path: str, key: object) -> str:
    name = key if isinstance(key, str) and key.isprintable() and len(key) <= _LONGEST_SHOWN else show(key)
    return f"{path}.{name}" if path else name


def check_header(content: Mapping[str, object]) -> None:
    """Raises ConfigError unless apiVersion and kind are those of a kube-proxy configuration."""
    for field, expected in (("kind", KIND), ("apiVersion", API_VERSION)):
        found = content.get(field)
        if found != expected:
            what = "is missing" if found is None else f"{show(found)} is not valid"
            raise ConfigError(field, f"{what}: must be {expected}")


def fields(content: Mapping[str, object]) -> dict[str, object]:
    """The values of the known fields that are there, by path. Raises ConfigError: a section is no mapping."""
    return {path: value for path, value in _walk(content, "") if path in _FIELDS}


def unknown(content: Mapping[str, object]) -> list[str]:
    """A warning for each field that is not known."""
    known = ("kind", "apiVersion")
    return [_unknown(path) for path, _ in _walk(content, "") if path not in _FIELDS and path not in known]


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
    """The known path that was probably meant: the same name in another place, or one spelt almost so."""
    name = path.lower().rpartition(".")[2]
    known = {field.lower(): field for field in sorted(_FIELDS | _SECTIONS)}
    elsewhere = [field for lower, field in known.items() if lower.rpartition(".")[2] == name]
    if elsewhere:
        return next((field for field in elsewhere if field.startswith("iptables.")), elsewhere[0])
    close = difflib.get_close_matches(path.lower(), known, n=1, cutoff=0.8)
    return known[close[0]] if close else ""
