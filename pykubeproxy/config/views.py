"""Output of a Config: /configz, /flagz and a configuration file."""

import functools
from collections.abc import Mapping
from typing import cast

from pykubeproxy.config import yaml
from pykubeproxy.config.document import API_VERSION, GROUP, KIND
from pykubeproxy.config.loading import flag_text
from pykubeproxy.config.model import Config
from pykubeproxy.config.table import ACTIONS, SETTINGS, Setting


def value_of(config: Config, setting: Setting) -> object:
    """Return the value of a setting."""
    if setting.attribute:
        return functools.reduce(getattr, setting.attribute.split("."), cast("object", config))
    return dict(config.ignored).get(setting.field, setting.default)


def configz(config: Config) -> dict[str, object]:
    """Return the content of /configz, to be encoded as JSON."""
    return {GROUP: _document(config)}


def _document(config: Config) -> dict[str, object]:
    """Return the KubeProxyConfiguration of a Config."""
    content: dict[str, object] = {"kind": KIND, "apiVersion": API_VERSION}
    for setting in SETTINGS:
        value = value_of(config, setting)
        if setting.field and not (setting.omitted and value == setting.default):
            *sections, name = setting.field.split(".")
            inner = content
            for section in sections:
                inner = cast("dict[str, object]", inner.setdefault(section, {}))
            inner[name] = setting.kind.plain(value)
    return content


def dump(config: Config) -> str:
    """Return a configuration file for this Config, in YAML.

    Values that only flags can set are lost: the master, a minSyncPeriod of 0, and servers turned off.
    """
    return yaml.dump(_document(config))


def flagz(flags: Mapping[str, object]) -> str:
    """Return the content of /flagz: each flag with its value in `flags` (in the form of `load`) or its default."""
    values = {setting.flag: _flag_value(setting, flags) for setting in SETTINGS + ACTIONS if setting.flag}
    values["help"] = "false"
    lines = (f"{name}: {value}" for name, value in sorted(values.items()))
    return "\n".join(("", "kube-proxy flagz", _WARNING, *lines, ""))


# The exact text of kube-proxy: monitoring looks for it.
_WARNING = (
    "Warning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees"
    " and is for debugging purposes only."
)


def _flag_value(setting: Setting, flags: Mapping[str, object]) -> str:
    kind = setting.kind
    if setting.flag not in flags:
        return kind.text(setting.default)
    given = flag_text(kind, flags[setting.flag])
    try:
        return kind.text(kind.parse(given))
    except ValueError:
        # Flags that a configuration file overrides are not checked.
        return given
