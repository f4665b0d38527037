"""The smoke test: `python3 -m vagrant.smoke` tests pykubeproxy on a real cluster with Python and kubectl."""
