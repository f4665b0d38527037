"""Configuration: a KubeProxyConfiguration file and flags in, one frozen and checked Config out.

Pure: callers read the file. One table, `SETTINGS`, defines each setting's flag, field, default, kind and help.
"""

from pykubeproxy.config.document import configz, dump, flagz
from pykubeproxy.config.loading import Loaded, load
from pykubeproxy.config.model import (
    Address,
    Config,
    ConfigError,
    Conntrack,
    DetectLocalMode,
    Dispatch,
    LogFormat,
)
from pykubeproxy.config.table import ACTIONS, SETTINGS, Setting
