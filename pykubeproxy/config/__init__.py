"""Configuration: a KubeProxyConfiguration file and flags in, one frozen and checked Config out.

Pure: callers read the file. One table, `SETTINGS`, defines each setting's flag, field, default, kind and help.
"""

from pykubeproxy.config.loading import Loaded, load
from pykubeproxy.config.model import (
    Address,
    Backend,
    Config,
    ConfigError,
    Conntrack,
    DetectLocalMode,
    Dispatch,
    LogFormat,
)
from pykubeproxy.config.table import ACTIONS, SETTINGS, Setting, Zero
from pykubeproxy.config.views import configz, dump, flagz, value_of

__all__ = [
    "ACTIONS",
    "SETTINGS",
    "Address",
    "Backend",
    "Config",
    "ConfigError",
    "Conntrack",
    "DetectLocalMode",
    "Dispatch",
    "Loaded",
    "LogFormat",
    "Setting",
    "Zero",
    "configz",
    "dump",
    "flagz",
    "load",
    "value_of",
]
