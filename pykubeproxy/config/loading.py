"""From the configuration file's content and the flags to one checked Config."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn, cast

import msgspec

from pykubeproxy.config import document, durations
from pykubeproxy.config.kinds import STRING, Kind
from pykubeproxy.config.model import Address, Config, ConfigError, DetectLocalMode
from pykubeproxy.config.network import split_address
from pykubeproxy.config.settings import Setting, Zero
from pykubeproxy.config.table import ACTIONS, HEALTH_PORT, METRICS_PORT, SETTINGS

_FLAGS = frozenset(setting.flag for setting in SETTINGS + ACTIONS if setting.flag)


class Loaded(NamedTuple):
    """A Config, and what its author should know: whole sentences, one for each thing passed over."""

    config: Config
    warnings: tuple[str, ...]


class _Given(NamedTuple):
    """A value that somebody gave, and what to call it in a message: its field's path or its flag."""

    name: str
    value: object


_Givens = dict[Setting, _Given]


def load(content: str | bytes | Mapping[str, object] | None, flags: Mapping[str, object]) -> Loaded:
    """The Config that a configuration file and flags make. Raises ConfigError.

    `content` is the file's text (YAML or JSON, bytes in UTF-8) or what was parsed from it; None: there is no
    file. `flags` holds the flags given explicitly, without dashes: {"v": "2", "masquerade-all": "true"}; a
    value is a text, or for a flag that stood several times a list of texts. Those of `ACTIONS` may be among
    them.

    Beside a file, only the flags that the table marks so count; a warning names those that do not. A field
    that is unknown, or stands twice, is a warning too: upstream decodes v1alpha1 strictly first, then
    leniently.
    """
    strangers = sorted(set(flags) - _FLAGS)
    if strangers:
        raise ConfigError(f"--{strangers[0]}", "there is no such flag")
    found, warnings = _of_file(content)
    given: _Givens = {}
    for setting in SETTINGS:
        if setting.field in found:
            _keep(given, setting, _from_file(setting, found[setting.field]))
        if setting.flag in flags:
            if content is None or setting.beside_config:
                _keep(given, setting, _from_flag(setting, flags[setting.flag]))
            warnings += _remarks(setting, content is not None)
    values = _defaults(given) | {
        setting.attribute: one.value for setting, one in given.items() if setting.attribute
    }
    if content is None:
        values |= _deprecated_ports(values, given, flags)
    _check(values, {setting.attribute: one.name for setting, one in given.items()})
    return Loaded(_assemble(values | {"ignored": _ignored(given)}), tuple(warnings))


def _of_file(content: str | bytes | Mapping[str, object] | None) -> tuple[dict[str, object], list[str]]:
    """The fields that the file sets, by path, and the warnings about its form."""
    if content is None:
        return {}, []
    parsed, twice = (content, []) if isinstance(content, Mapping) else document.parse(content)
    document.check_header(parsed)
    return document.fields(parsed), twice + document.unknown(parsed)


def _from_file(setting: Setting, raw: object) -> _Given | None:
    """The value of a field, or None if it stands for the default."""
    if raw is None or (raw == "" and setting.zero is not Zero.COUNTS):
        return None
    value = _understood(setting.field, raw, setting.kind.read)
    return None if setting.zero is not Zero.COUNTS and not value else _Given(setting.field, value)


def _from_flag(setting: Setting, raw: object) -> _Given | None:
    """The value of a flag, or None if it stands for the default."""
    text = flag_text(setting.kind, raw)
    if text == "" and setting.zero is Zero.DEFAULT:
        return None
    value = _understood(f"--{setting.flag}", text, setting.kind.parse)
    return None if setting.zero is Zero.DEFAULT and not value else _Given(f"--{setting.flag}", value)


def _keep(given: _Givens, setting: Setting, value: _Given | None) -> None:
    if value is not None:
        given[setting] = value


def _understood(name: str, raw: object, read: Callable[..., object]) -> object:
    try:
        return read(raw)
    except ValueError as error:
        raise ConfigError(name, f"{document.show(raw)} is not valid: {error}") from None


def flag_text(kind: Kind, raw: object) -> str:
    """The text of a flag's value. Of a flag given several times: all joined, or for most kinds the last."""
    if isinstance(raw, bool):
        return "true" if raw else "false"
    if isinstance(raw, list | tuple):
        texts = [str(item) for item in raw]
        return ",".join(filter(None, texts)) if kind.repeatable else texts[-1]
    return str(raw)


def _remarks(setting: Setting, beside_file: bool) -> list[str]:
    """What to say about a flag that was given."""
    if beside_file and not setting.beside_config:
        where = f"; set {setting.field} in the file instead" if setting.field else ""
        return [f"The flag --{setting.flag} is ignored beside a configuration file{where}."]
    if setting.instead:
        return [f"The flag --{setting.flag} is deprecated; use --{setting.instead} instead."]
    return []


def _defaults(given: _Givens) -> dict[str, object]:
    """The defaults of all settings with an attribute. Those of the servers follow bindAddress's family."""
    values = {setting.attribute: setting.default for setting in SETTINGS if setting.attribute}
    bind = next((str(one.value) for setting, one in given.items() if setting.attribute == "bind_address"), "")
    if ":" in bind:
        values["health_address"] = Address("::", HEALTH_PORT)
        values["metrics_address"] = Address("::1", METRICS_PORT)
    return values


def _deprecated_ports(
    values: Mapping[str, object], given: _Givens, flags: Mapping[str, object]
) -> dict[str, object]:
    """What --healthz-port and --metrics-port change: 0 turns a server off, another port completes an address.

    As upstream, where the default address has its port already, so that a port alone changes nothing.
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
    """What no setting can say of itself alone. `names` has what to call a value that was given."""

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
    """The fields without effect that were given and differ from their default, in the order of the table."""
    found = ((setting, given[setting].value) for setting in SETTINGS if setting in given and setting.ignored)
    return tuple(
        (setting.field, value) for setting, value in found if setting.field and value != setting.default
    )


def _assemble(values: Mapping[str, object]) -> Config:
    """The Config of values by attribute path."""
    nested: dict[str, object] = {}
    for path, value in values.items():
        *groups, name = path.split(".")
        inner = nested
        for group in groups:
            inner = cast("dict[str, object]", inner.setdefault(group, {}))
        inner[name] = value
    return msgspec.convert(nested, Config)
