"""Click options that commands share: the flags of the configuration, and -f, -o, --family, --rules, --node-address."""

import functools
import ipaddress
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from pykubeproxy.cli.help import ACTION, QUESTION, SOURCE, Topic, option, with_options
from pykubeproxy.cli.terminal import echo_line
from pykubeproxy.config import ACTIONS, SETTINGS, Config, ConfigError, Loaded, Setting, load
from pykubeproxy.config.kinds import BOOL
from pykubeproxy.objects import Family, Protocol

# Fields, their sections or, without a field, flags.
_NAMES: dict[Topic, tuple[str, ...]] = {
    Topic.CONFIGURATION: ("config",),
    Topic.API_SERVER: ("clientConnection", "master", "configSyncPeriod"),
    Topic.NODE: (
        "hostnameOverride",
        "bindAddress",
        "oomScoreAdj",
        "detectLocalMode",
        "detectLocal",
        "clusterCIDR",
    ),
    Topic.TRAFFIC: (
        "featureGates",
        "nodePortAddresses",
        "iptables.masqueradeBit",
        "iptables.masqueradeAll",
        "iptables.localhostNodePorts",
    ),
    Topic.SYNC: ("mode", "iptables", "pykubeproxy"),
    Topic.CONNTRACK: ("conntrack",),
    Topic.HEALTH: ("healthzBindAddress", "metricsBindAddress", "bindAddressHardFail"),
    Topic.LOGGING: ("logging",),
}
_TOPICS = {name: topic for topic, names in _NAMES.items() for name in names}


def topic_of(setting: Setting) -> Topic:
    """Return the topic of a setting, or of --config. Raises KeyError if a setting with an effect has none."""
    name = setting.field or setting.flag
    if name in _TOPICS:
        return _TOPICS[name]
    return _TOPICS[name.partition(".")[0]] if setting.attribute else Topic.NO_EFFECT


_Command = TypeVar("_Command", bound=Callable[..., Any])

# As in kube-proxy, --masquerade_all means --masquerade-all.
CONTEXT_SETTINGS = {"token_normalize_func": lambda token: token.replace("_", "-")}

_CONFIG = next(setting for setting in ACTIONS if setting.flag == "config")
_FLAGGED = (_CONFIG, *(setting for setting in SETTINGS if setting.flag))
_EXITING = tuple(setting for setting in ACTIONS if setting is not _CONFIG)


def _families(_: click.Context, __: click.Parameter, value: str | None) -> tuple[Family, ...]:
    return tuple(family for family in Family if value in (None, family.value.lower()))


def _family(_: click.Context, __: click.Parameter, value: str | None) -> Family | None:
    return next((family for family in Family if family.value.lower() == value), None)


def _protocol(_: click.Context, __: click.Parameter, value: str | None) -> Protocol | None:
    return Protocol(value.upper()) if value else None


def _plain_addresses(
    _: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    try:
        return tuple(str(ipaddress.ip_interface(value).ip) for value in values)
    except ValueError as error:
        raise click.BadParameter(f"{error}; use the form 192.168.1.10/24", param=parameter) from None


def choice_option(
    *names: str, choices: tuple[str, ...], group: str, **attributes: Any
) -> Callable[[_Command], _Command]:
    """Make an option of a group with a few values; the first is the default."""
    type_ = click.Choice(choices)
    return option(*names, type=type_, default=choices[0], show_default=True, group=group, **attributes)


backend_option = functools.partial(
    choice_option, "--iptables-backend", "backend", choices=("auto", "nft", "legacy")
)
_FAMILIES = click.Choice([family.value.lower() for family in Family])
family_option = option(
    "--family",
    "families",
    type=_FAMILIES,
    callback=_families,
    help="Use this address family only.  [default: both]",
    group=QUESTION,
)
# One family or protocol of a connection; the command gets None for the default, which `help` names.
connection_family_option = functools.partial(
    option, "--family", type=_FAMILIES, callback=_family, group=QUESTION
)
protocol_option = functools.partial(
    option,
    "--proto",
    "protocol",
    type=click.Choice([protocol.value.lower() for protocol in Protocol], case_sensitive=False),
    callback=_protocol,
    group=QUESTION,
)
filename_option = option(
    "-f",
    "--filename",
    metavar="PATH",
    help='Read objects from a YAML or JSON file, a folder or "-" instead of an API server.',
    group=SOURCE,
)
rules_option = option(
    "--rules",
    "files",
    type=click.Path(allow_dash=True),
    multiple=True,
    metavar="FILE",
    help="Read rules from output of iptables-save, ip6tables-save or `nft -j list ruleset`, plain or gzip, in"
    ' FILE or "-" instead of the live rules; this needs no root. Repeatable.',
    group=SOURCE,
)

node_address_option = option(
    "--node-address",
    "addresses",
    multiple=True,
    callback=_plain_addresses,
    metavar="CIDR",
    help="An address of the node, if its rules or objects come from files. Repeatable.  [default: those of its Node]",
    group=SOURCE,
)


def config_options(command: _Command, *, without: str = "") -> _Command:
    """Add --config and the flags of all settings to a command, but for the flag `without`.

    The command gets one argument `flags`: the given flags by name without dashes, with their text, or a tuple of texts
    for repeatable flags. Flags without effect and deprecated flags are accepted but hidden from `--help`.
    """
    return with_options(command, (_option(setting) for setting in _FLAGGED if setting.flag != without))


def action_options(command: _Command) -> _Command:
    """Add --write-config-to, --init-only, --cleanup and --version to `flags`; see `is_on` for the last three."""
    return with_options(command, map(_option, _EXITING))


def is_on(flags: Mapping[str, object], name: str) -> bool:
    """Return whether the boolean flag `name` is true. Raises ClickException if it is neither true nor false."""
    setting = next(setting for setting in _EXITING if setting.flag == name)
    try:
        return bool(setting.kind.parse(str(flags.get(name, "false"))))
    except ValueError as error:
        raise click.ClickException(f'--{name}: "{flags[name]}" is not valid: {error}') from None


def load_config(flags: Mapping[str, object], option: str = "--config") -> Loaded:
    """Load the configuration from `flags` and the file of --config, which `option` gave. Raises ClickException."""
    path = str(flags.get("config", ""))
    try:
        return load(Path(path).read_bytes() if path else None, flags)
    except OSError as error:
        raise click.ClickException(f"{option}: cannot read {path}: {error.strerror or error}") from None
    except ConfigError as error:
        raise click.ClickException(
            str(error) if not path or error.field.startswith("--") else f"{path}: {error}"
        ) from None


def read_config(flags: Mapping[str, object], option: str = "--config") -> Config:
    """Load the configuration and print its warnings to standard error. Raises ClickException."""
    config, warnings = load_config(flags, option)
    for warning in warnings:
        echo_line(warning, err=True)
    return config


def _option(setting: Setting) -> Callable[[_Command], _Command]:
    short = len(setting.flag) == 1

    def collect(context: click.Context, _: click.Parameter, value: object) -> None:
        flags = context.params.setdefault("flags", {})
        if value not in (None, ()):
            # Go takes "-v=2"; click leaves the "=" of a short option in its value.
            flags[setting.flag] = str(value).removeprefix("=") if short else value

    # As in Go, "--masquerade-all" without a value means true. Any flag_value, even None, makes a value optional.
    bare: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if setting.kind is BOOL else {}
    return option(
        *([f"-{setting.flag}"] if short else []),
        f"--{setting.flag}",
        multiple=setting.kind.repeatable,
        default=None,
        callback=collect,
        expose_value=False,
        metavar=setting.kind.name,
        help=_help(setting),
        group=ACTION if setting in _EXITING else topic_of(setting),
        hidden=setting not in ACTIONS and (setting.ignored or bool(setting.instead)),
        **bare,
    )


def _help(setting: Setting) -> str:
    default = setting.kind.text(setting.default)
    return setting.help if default in ("", "[]", "false") else f"{setting.help}  [default: {default}]"
