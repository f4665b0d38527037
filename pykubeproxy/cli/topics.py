"""The topics of settings: headings of `run --help` and of the configuration reference."""

from pykubeproxy.cli.help import Topic
from pykubeproxy.config import Setting

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
