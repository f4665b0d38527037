"""Build one checked Config from the configuration file and flags."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, cast

import msgspec

from pykubeproxy.config import document, durations
from pykubeproxy.config.kinds import STRING, ValueKind
from pykubeproxy.config.model import Address, Config, ConfigError, DetectLocalMode
from pykubeproxy.config.network import split_address
from pykubeproxy.config.table import ACTIONS, HEALTH_PORT, METRICS_PORT, SETTINGS, Setting, Zero

_FLAGS = frozenset(setting.flag for setting in SETTINGS + ACTIONS if setting.flag)


class Loaded(NamedTuple):
    """A Config, and a warning in a full sentence for each ignored or deprecated setting."""

    config: Config
    warnings: tuple[str, ...]


class _Given(NamedTuple):
    """A given value, and the path or flag that messages name."""

    name: str
    value: object


_Givens = dict[Setting, _Given]


def load(content: str | bytes | Mapping[str, object] | None, flags: Mapping[str, object]) -> Loaded:
    """Return the Config for a configuration file and flags. Raise ConfigError.

    `content` is the file's text (YAML or JSON, bytes in UTF-8) or the parsed mapping; None means no file. `flags` are
    the given flags without dashes: {"v": "2", "masquerade-all": "true"}, with a list for a repeated flag. They may
    include `ACTIONS`.

    With a file, only flags with `beside_config` count, with a warning for each other flag. Unknown and duplicate fields
    are warnings too: kube-proxy decodes v1alpha1 strictly, then leniently.
    """
    if unknown := sorted(set(flags) - _FLAGS):
        raise ConfigError(f"--{unknown[0]}", "unknown flag")
    fields, warnings = _from_document(content)
    given: _Givens = {}
    for setting in SETTINGS:
        if setting.field in fields:
            _keep(given, setting, _from_file(setting, fields[setting.field]))
        if setting.flag in flags:
            if content is None or setting.beside_config:
                _keep(given, setting, _from_flag(setting, flags[setting.flag]))
            warnings += _flag_warnings(setting, content is not None)
    values = _defaults(given) | {
        setting.attribute: one.value for setting, one in given.items() if setting.attribute
    }
    if content is None:
        values |= _deprecated_ports(values, given, flags)
    _check(values, {setting.attribute: one.name for setting, one in given.items()})
    return Loaded(_assemble(values | {"ignored": _ignored(given)}), tuple(warnings))


def _from_document(content: str | bytes | Mapping[str, object] | None) -> tuple[dict[str, object], list[str]]:
    """Return the fields of the file by path, and warnings."""
    if content is None:
        return {}, []
    parsed, warnings = (content, []) if isinstance(content, Mapping) else document.parse(content)
    document.check_header(parsed)
    return document.fields(parsed), warnings + document.unknown(parsed)


def _from_file(setting: Setting, raw: object) -> _Given | None:
    """Return the value of a field, None for the default."""
    if raw is None or (raw == "" and setting.zero is not Zero.COUNTS):
        return None
    value = _convert(setting.field, raw, setting.kind.read)
    return None if setting.zero is not Zero.COUNTS and not value else _Given(setting.field, value)


def _from_flag(setting: Setting, raw: object) -> _Given | None:
    """Return the value of a flag, None for the default."""
    text = flag_text(setting.kind, raw)
    if text == "" and setting.zero is Zero.DEFAULT:
        return None
    value = _convert(f"--{setting.flag}", text, setting.kind.parse)
    return None if setting.zero is Zero.DEFAULT and not value else _Given(f"--{setting.flag}", value)


def _keep(given: _Givens, setting: Setting, value: _Given | None) -> None:
    if value is not None:
        given[setting] = value


def _convert(name: str, raw: object, read: Callable[..., object]) -> object:
    try:
        return read(raw)
    except ValueError as error:
        raise ConfigError(name, f"{document.show(raw)} is not valid: {error}") from None


def flag_text(kind: ValueKind, raw: object) -> str:
    """Return the text of a flag's value; of a repeated flag all values joined, or for most kinds the last."""
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if isinstance(raw, list | tuple):
        texts = [str(item) for item in raw]
        return ",".join(filter(None, texts)) if kind.repeatable else texts[-1]
    return str(raw)


def _flag_warnings(setting: Setting, beside_file: bool) -> list[str]:
    """Return the warnings about a given flag."""
    if beside_file and not setting.beside_config:
        where = f"; set {setting.field} in the file instead" if setting.field else ""
        return [f"The flag --{setting.flag} is ignored beside a configuration file{where}."]
    if setting.instead:
        return [f"The flag --{setting.flag} is deprecated; use --{setting.instead} instead."]
    return []


def _defaults(given: _Givens) -> dict[str, object]:
    """Return the defaults by attribute. Those of the servers depend on the family of bindAddress."""
    values = {setting.attribute: setting.default for setting in SETTINGS if setting.attribute}
    bind = next((str(one.value) for setting, one in given.items() if setting.attribute == "bind_address"), "")
    if ":" in bind:
        values["health_address"] = Address("::", HEALTH_PORT)
        values["metrics_address"] = Address("::1", METRICS_PORT)
    return values


def _deprecated_ports(
    values: Mapping[str, object], given: _Givens, flags: Mapping[str, object]
) -> dict[str, object]:
    """Apply --healthz-port and --metrics-port: 0 turns a server off, another port completes an address without port.

    As in kube-proxy, a port alone has no effect because the default address has a port.
    """
    changed: dict[str, object] = {}
    ports = {setting.flag: one.value for setting, one in given.items() if setting.instead}
    for attribute, name in (("health_address", "healthz"), ("metrics_address", "metrics")):
        port, address = ports.get(f"{name}-port"), values[attribute]
        text = flag_text(STRING, flags.get(f"{name}-bind-address", ""))
        if port == 0:
            changed[attribute] = None
        elif isinstance(port, int) and text and isinstance(address, Address) and not split_address(text)[1]:
            changed[attribute] = address._replace(port=port)
    return changed


def _check(values: Mapping[str, object], names: Mapping[str, str]) -> None:
    """Raise ConfigError for conflicting settings. `names` are those of given values in messages."""

    def refuse(attribute: str, message: str) -> NoReturn:
        field = next(setting.field for setting in SETTINGS if setting.attribute == attribute)
        raise ConfigError(names.get(attribute, field), message)

    def seconds(attribute: str) -> float:
        value = values[attribute]
        return value if isinstance(value, float) else 0.0

    for period in ("iptables.sync_period", "config_sync_period"):
        if not seconds(period) > 0:
            refuse(period, f"{durations.render(seconds(period))} is not valid: must be greater than 0")
    least, most = seconds("iptables.min_sync_period"), seconds("iptables.sync_period")
    if least > most:
        limit = f"must be at most the sync period, {durations.render(most)}"
        refuse("iptables.min_sync_period", f"{durations.render(least)} is not valid: {limit}")
    for mode, attribute in _INTERFACE_OF.items():
        if values["detect_local.mode"] is mode and not values[attribute]:
            refuse(attribute, f'"" is not valid: must name an interface, as the mode is {mode.value}')


_INTERFACE_OF = {
    DetectLocalMode.BRIDGE_INTERFACE: "detect_local.bridge_interface",
    DetectLocalMode.INTERFACE_NAME_PREFIX: "detect_local.interface_name_prefix",
}


def _ignored(given: _Givens) -> tuple[tuple[str, object], ...]:
    """Return the given fields without effect that differ from their default, in the order of the table."""
    found = ((setting, given[setting].value) for setting in SETTINGS if setting in given and setting.ignored)
    return tuple(
        (setting.field, value) for setting, value in found if setting.field and value != setting.default
    )


def _assemble(values: Mapping[str, object]) -> Config:
    """Return the Config for values by attribute path."""
    nested: dict[str, object] = {}
    for path, value in values.items():
        *groups, name = path.split(".")
        inner = nested
        for group in groups:
            inner = cast("dict[str, object]", inner.setdefault(group, {}))
        inner[name] = value
    return msgspec.convert(nested, Config)
