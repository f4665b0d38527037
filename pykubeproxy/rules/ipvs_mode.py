"""The chains and jumps of kube-proxy's ipvs mode that differ from those of iptables mode."""

from pykubeproxy.rules.ruleset import ChainKey

# The chains of ipvs mode only; it shares others with iptables mode.
CHAINS = frozenset(
    {
        ChainKey("nat", "KUBE-NODE-PORT"),
        ChainKey("nat", "KUBE-LOAD-BALANCER"),
        ChainKey("filter", "KUBE-NODE-PORT"),
        ChainKey("filter", "KUBE-SOURCE-RANGES-FIREWALL"),
        ChainKey("filter", "KUBE-IPVS-FILTER"),
        ChainKey("filter", "KUBE-IPVS-OUT-FILTER"),
    }
)
# The comments of jumps that only ipvs mode has in built-in chains.
COMMENTS = frozenset(
    {"kubernetes health check rules", "kube-proxy firewall rules", "kubernetes ipvs access filter"}
)
