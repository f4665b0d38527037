"""The lab: a cluster without a cluster, made of network namespaces and a small API server."""
