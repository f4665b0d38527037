"""Build one checked Config from the configuration file and flags."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

import msgspec

from pykubeproxy.config import document, durations
from pykubeproxy.config.kinds import STRING, flag_text
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

_INTERFACE_OF = {
    DetectLocalMode.BRIDGE_INTERFACE: "bridge_interface",
    DetectLocalMode.INTERFACE_NAME_PREFIX: "interface_name_prefix",
}


def load(content: str | bytes | Mapping[str, object] | None, flags: Mapping[str, object]) -> Loaded:
    """Return the Config for a configuration file and flags. Raises ConfigError.

    `content` is the file's text (YAML or JSON, bytes in UTF-8) or the parsed mapping; None means no file. `flags` are
    the given flags without dashes: {"v": "2", "masquerade-all": "true"}, with a list for a repeated flag. They may
    include `ACTIONS`.

    With a file, only flags with `beside_config` count; each other flag causes a warning. Unknown and duplicate fields
    cause warnings too, as in kube-proxy, which falls back to lenient decoding for v1alpha1. So do invalid values of
    tolerant settings in the file.
    """
    if unknown := sorted(set(flags) - _FLAGS):
        raise ConfigError(f"--{unknown[0]}", "unknown flag")
    fields, warnings = _from_document(content)
    given: _Givens = {}
    for setting in SETTINGS:
        raw = fields.get(setting.field)
        if raw is not None:
            try:
                given |= _given_field(setting, raw)
            except ConfigError as error:
                if not setting.tolerant:
                    raise
                warnings.append(f"The field {error.field} is ignored: {error.problem}.")
        if setting.flag in flags:
            if content is None or setting.beside_config:
                given |= _given_flag(setting, flags[setting.flag])
            warnings += _flag_warnings(setting, content is not None)
    values = _defaults(given) | {
        setting.attribute: entry.value for setting, entry in given.items() if setting.attribute
    }
    if content is None:
        values |= _deprecated_ports(values, given, flags)
    config = msgspec.convert(document.nested(values | {"ignored": _ignored(given)}), Config)
    _check(config, {setting.attribute: entry.name for setting, entry in given.items()})
    return Loaded(config, tuple(warnings))


def _from_document(content: str | bytes | Mapping[str, object] | None) -> tuple[dict[str, object], list[str]]:
    """Return the fields of the file by path, and warnings."""
    if content is None:
        return {}, []
    parsed, warnings = (content, []) if isinstance(content, Mapping) else document.parse(content)
    document.check_header(parsed)
    return document.fields(parsed), warnings + document.unknown(parsed)


def _given_field(setting: Setting, raw: object) -> _Givens:
    return _given(setting, setting.field, raw, setting.kind.read, setting.zero is not Zero.COUNTS)


def _given_flag(setting: Setting, raw: object) -> _Givens:
    text = flag_text(setting.kind, raw)
    return _given(setting, f"--{setting.flag}", text, setting.kind.parse, setting.zero is Zero.DEFAULT)


def _given(
    setting: Setting, name: str, raw: object, read: Callable[..., object], zero_is_default: bool
) -> _Givens:
    """Return the value of a field or flag, an empty mapping for the default. Raises ConfigError."""
    if raw == "" and zero_is_default:
        return {}
    try:
        value = read(raw)
    except ValueError as error:
        raise ConfigError(name, f"{document.show(raw)} is not valid: {error}") from None
    return {} if zero_is_default and not value else {setting: _Given(name, value)}


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
    bind = next(
        (str(entry.value) for setting, entry in given.items() if setting.attribute == "bind_address"), ""
    )
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
    ports = {setting.flag: entry.value for setting, entry in given.items() if setting.instead}
    for attribute, name in (("health_address", "healthz"), ("metrics_address", "metrics")):
        port, address = ports.get(f"{name}-port"), values[attribute]
        text = flag_text(STRING, flags.get(f"{name}-bind-address", ""))
        if port == 0:
            changed[attribute] = None
        elif isinstance(port, int) and text and isinstance(address, Address) and not split_address(text)[1]:
            changed[attribute] = address._replace(port=port)
    return changed


def _check(config: Config, names: Mapping[str, str]) -> None:
    """Raise ConfigError for conflicting settings. `names` are the fields or flags that messages name, by attribute."""

    def reject(attribute: str, value: str, allowed: str) -> NoReturn:
        field = next(setting.field for setting in SETTINGS if setting.attribute == attribute)
        raise ConfigError(names.get(attribute, field), f"{value} is not valid: must {allowed}")

    least, most = config.iptables.min_sync_period, config.iptables.sync_period
    for attribute, period in (
        ("iptables.sync_period", most),
        ("config_sync_period", config.config_sync_period),
    ):
        if period <= 0:
            reject(attribute, durations.render(period), "be greater than 0")
    if least > most:
        limit = f"be at most the sync period, {durations.render(most)}"
        reject("iptables.min_sync_period", durations.render(least), limit)
    interface = _INTERFACE_OF.get(config.detect_local.mode)
    if interface and not getattr(config.detect_local, interface):
        allowed = f"name an interface in mode {config.detect_local.mode}"
        reject(f"detect_local.{interface}", '""', allowed)


def _ignored(given: _Givens) -> tuple[tuple[str, object], ...]:
    """Return the given fields without effect that differ from their default."""
    return tuple(
        (setting.field, entry.value)
        for setting, entry in given.items()
        if setting.ignored and setting.field and entry.value != setting.default
    )
