"""The pages of an agent as values: the agent encodes them, commands decode the same types.

Keys are in camelCase, as in the Kubernetes API; times are numbers of seconds since 1970. Two pages differ. `kube_proxy`
has the pages of kube-proxy, with its keys and formats. /servicez has the objects as this program keeps them, with the
names of their fields; only programs of the same version read it.
"""
