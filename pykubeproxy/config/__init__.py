"""Configuration: a KubeProxyConfiguration and flags in, one frozen and checked Config out.

Pure: the text of the file comes in; reading it is the caller's. One table (`SETTINGS`) says of each setting
its flag, its field, its default, its kind and its meaning, and everything else is made from it.
"""

from pykubeproxy.config.loading import Loaded, load
from pykubeproxy.config.model import (
    Address,
    Backend,
    Client,
    Config,
    ConfigError,
    Conntrack,
    DetectLocal,
    DetectLocalMode,
    Dispatch,
    FeatureGates,
    Iptables,
    LogFormat,
    Logging,
)
from pykubeproxy.config.settings import Setting, Zero
from pykubeproxy.config.table import ACTIONS, SETTINGS
from pykubeproxy.config.views import changed_fields, configz, dump, flagz, value_of

__all__ = [
    "ACTIONS",
    "SETTINGS",
    "Address",
    "Backend",
    "Client",
    "Config",
    "ConfigError",
    "Conntrack",
    "DetectLocal",
    "DetectLocalMode",
    "Dispatch",
    "FeatureGates",
    "Iptables",
    "Loaded",
    "LogFormat",
    "Logging",
    "Setting",
    "Zero",
    "changed_fields",
    "configz",
    "dump",
    "flagz",
    "load",
    "value_of",
]
