"""Build one frozen and checked Config from a KubeProxyConfiguration file and flags.

Pure: callers read the file. One table, `SETTINGS`, defines each setting's flag, field, default, kind and help.
"""

from pykubeproxy.config.document import configz, dump, flag_values, flagz
from pykubeproxy.config.loading import Loaded, load
from pykubeproxy.config.model import (
    EMULATED,
    Address,
    Config,
    ConfigError,
    Conntrack,
    DetectLocalMode,
    Dispatch,
    LogFormat,
)
from pykubeproxy.config.network import PRIMARY
from pykubeproxy.config.table import ACTIONS, SETTINGS, Setting
