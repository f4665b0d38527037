"""Build one frozen and checked Config from a KubeProxyConfiguration file and flags.

Pure: callers read the file. One table, `SETTINGS`, defines each setting's flag, field, default, kind and help.
"""

from pykubeproxy.config.document import configz, dump, flag_values, flagz
from pykubeproxy.config.kinds import PRIMARY
from pykubeproxy.config.loading import Loaded, load
from pykubeproxy.config.model import (
    EMULATED,
    Config,
    ConfigError,
    Conntrack,
    DetectLocalMode,
    Dispatch,
    ListenAddress,
    LogFormat,
)
from pykubeproxy.config.table import ACTIONS, SETTINGS, Setting
