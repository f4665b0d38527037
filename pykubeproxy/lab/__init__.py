"""The lab: a cluster on one machine, made of network namespaces and a small API server."""
