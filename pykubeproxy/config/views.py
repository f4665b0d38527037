"""A Config as others see it: /configz, /flagz, a configuration file, and what differs between two."""

import functools
from collections.abc import Mapping
from typing import cast

import yaml

from pykubeproxy.config.document import API_VERSION, GROUP, KIND
from pykubeproxy.config.loading import flag_text
from pykubeproxy.config.model import Config
from pykubeproxy.config.settings import Setting
from pykubeproxy.config.table import ACTIONS, SETTINGS


def value_of(config: Config, setting: Setting) -> object:
    """The value that `config` has for a setting."""
    if setting.attribute:
        return functools.reduce(getattr, setting.attribute.split("."), cast("object", config))
    return dict(config.ignored).get(setting.field, setting.default)


def configz(config: Config) -> dict[str, object]:
    """What /configz answers, to be encoded as JSON."""
    return {GROUP: _document(config)}


def _document(config: Config) -> dict[str, object]:
    """The KubeProxyConfiguration of a Config, every field in its place."""
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
    """The configuration file that makes this Config, in YAML.

    What only flags can say is lost: a master, and, as zero stands for the default in a file, a minSyncPeriod
    of 0 and servers turned off.
    """
    return str(yaml.safe_dump(_document(config), sort_keys=False))


def flagz(flags: Mapping[str, object]) -> str:
    """What /flagz answers: each flag with its value in `flags` (as `load` takes them) or its default."""
    values = {setting.flag: _flag_value(setting, flags) for setting in SETTINGS + ACTIONS if setting.flag}
    values["help"] = "false"
    lines = (f"{name}: {value}" for name, value in sorted(values.items()))
    return "\n".join(("", "kube-proxy flagz", _WARNING, *lines, ""))


# The very words of upstream: monitoring looks for them.
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
        # Beside a configuration file most flags are ignored, so nobody has minded what it is.
        return given


def changed_fields(old: Config, new: Config) -> tuple[str, ...]:
    """The settings that differ and matter, by field path (by flag for those that no file holds)."""
    return tuple(
        setting.field or f"--{setting.flag}"
        for setting in SETTINGS
        if setting.attribute and value_of(old, setting) != value_of(new, setting)
    )
