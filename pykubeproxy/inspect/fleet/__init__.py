"""Whether the rules of many nodes follow the objects: the comparison behind `kubectl pykubeproxy diff`."""
