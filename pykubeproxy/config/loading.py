"""Build one checked Config from the configuration file and flags."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import msgspec

from pykubeproxy.config import document
from pykubeproxy.config.kinds import (
    cluster_cidrs,
    duration_text,
    flag_text,
    interface,
    plain_text,
    split_address,
)
from pykubeproxy.config.model import Config, ConfigError, DetectLocalMode, ListenAddress
from pykubeproxy.config.table import ACTIONS, BURST, HEALTH_PORT, METRICS_PORT, QPS, SETTINGS, Setting, Zero

_BIND_ADDRESS, _HEALTH, _METRICS = (
    next(setting for setting in SETTINGS if setting.attribute == attribute)
    for attribute in ("bind_address", "health_address", "metrics_address")
)
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
_Values = dict[Setting, object]  # as given, or the default
_Effective = dict[str, object]  # by attribute
_Names = Mapping[str, str]  # the fields or flags that messages name, by attribute

# The attribute that a mode uses, and its check.
_USED: Mapping[DetectLocalMode, tuple[str, Callable[..., object]]] = {
    DetectLocalMode.CLUSTER_CIDR: ("detect_local.cluster_cidrs", cluster_cidrs),
    DetectLocalMode.BRIDGE_INTERFACE: (
        "detect_local.bridge_interface",
        interface(DetectLocalMode.BRIDGE_INTERFACE, 15),
    ),
    DetectLocalMode.INTERFACE_NAME_PREFIX: (
        "detect_local.interface_name_prefix",
        interface(DetectLocalMode.INTERFACE_NAME_PREFIX, 14),
    ),
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
        if setting.field in fields:
            try:
                given |= _given_field(setting, fields[setting.field])
            except ConfigError as error:
                if not setting.tolerant:
                    raise
                warnings.append(f"The field {error.field} is ignored: {error.problem}.")
        if setting.flag in flags:
            if content is None or setting.beside_config:
                given |= _given_flag(setting, flags[setting.flag])
            warnings += _flag_warnings(setting, content is not None)
    names = {setting.attribute: entry.name for setting, entry in given.items()}
    values: _Values = {setting: setting.default for setting in SETTINGS}
    values |= {setting: entry.value for setting, entry in given.items()}
    values |= _listen_addresses(given, writes=bool(flags.get("write-config-to")))
    effective = {
        setting.attribute: setting.kind.effective(value)
        for setting, value in values.items()
        if setting.attribute
    }
    effective |= _request_limits(effective, names)
    effective |= _local_traffic(effective, names)
    effective["document"] = document.document(values)
    config = msgspec.convert(document.nested(effective), Config)
    _check_periods(config, names)
    return Loaded(config, tuple(warnings))


def _from_document(content: str | bytes | Mapping[str, object] | None) -> tuple[dict[str, object], list[str]]:
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
    if raw == "" and zero_is_default and setting.kind.textual:
        return {}
    try:
        value = read(raw)
        setting.kind.effective(value)
    except ValueError as error:
        raise ConfigError(name, f"{document.show(raw)} is not valid: {error}") from None
    return {} if zero_is_default and not value else {setting: _Given(name, value)}


def _flag_warnings(setting: Setting, beside_file: bool) -> list[str]:
    if beside_file and not setting.beside_config:
        where = f"; set {setting.field} in the file instead" if setting.field else ""
        return [f"The flag --{setting.flag} is ignored beside a configuration file{where}."]
    if setting.instead:
        return [f"The flag --{setting.flag} is deprecated; use --{setting.instead} instead."]
    return []


def _listen_addresses(given: _Givens, writes: bool) -> _Values:
    """Return the servers' addresses with a port each, as kube-proxy completes them; "" means no server.

    The defaults have the family of a bindAddress in the file. Of the deprecated flags, 0 turns a server off, unless the
    configuration is written to a file, and another port completes an address without port.
    """
    bind = given.get(_BIND_ADDRESS)
    is_ipv6 = bool(
        bind and bind.name == "bindAddress" and ":" in str(_BIND_ADDRESS.kind.effective(bind.value))
    )
    addresses: _Values = {}
    for setting, host, port in ((_HEALTH, "::", HEALTH_PORT), (_METRICS, "::1", METRICS_PORT)):
        address = str(
            given[setting].value
            if setting in given
            else ListenAddress(host, port)
            if is_ipv6
            else setting.default
        )
        deprecated = next(
            (entry for given_setting, entry in given.items() if given_setting.instead == setting.flag), None
        )
        if deprecated and deprecated.value == 0 and not writes:
            address = ""
        elif not split_address(address)[1]:
            if deprecated and not 0 <= (port := cast("int", deprecated.value) or port) <= 65535:
                raise ConfigError(
                    deprecated.name, f"{port} is not valid: must be a port from 1 to 65535, or 0"
                )
            address = str(ListenAddress(address, port))
        addresses[setting] = address
    return addresses


def _request_limits(values: _Effective, names: _Names) -> _Effective:
    """Apply the defaults of client-go: 0 requests per second mean 5, and then a burst of 0 means 10."""
    qps, burst = cast("float", values["client.qps"]), values["client.burst"]
    if qps > 0 and not burst:
        raise _invalid("client.burst", "0", "must be greater than 0", names)
    return {} if qps else {"client.qps": QPS, "client.burst": burst or BURST}


def _local_traffic(values: _Effective, names: _Names) -> _Effective:
    """Check the value that detectLocalMode uses, and return it in canonical form."""
    mode = DetectLocalMode(str(values["detect_local.mode"]))
    if mode not in _USED:
        return {}
    attribute, check = _USED[mode]
    try:
        return {attribute: check(values[attribute])}
    except ValueError as error:
        raise _invalid(attribute, document.show(plain_text(values[attribute])), str(error), names) from None


def _check_periods(config: Config, names: _Names) -> None:
    """Raise ConfigError for a period that must not be 0, or is less than the minimum."""
    least, most = config.iptables.min_sync_period, config.iptables.sync_period
    for attribute, period in (
        ("iptables.sync_period", most),
        ("config_sync_period", config.config_sync_period),
    ):
        if period <= 0:
            raise _invalid(attribute, duration_text(period), "must be greater than 0", names)
    if least > most:
        limit = f"must be at most the sync period, {duration_text(most)}"
        raise _invalid("iptables.min_sync_period", duration_text(least), limit, names)


def _invalid(attribute: str, shown: str, allowed: str, names: _Names) -> ConfigError:
    field = next(setting.field for setting in SETTINGS if setting.attribute == attribute)
    return ConfigError(names.get(attribute, field), f"{shown} is not valid: {allowed}")
