"""The smoke test: `python3 -m vagrant.smoke` tries pykubeproxy on a real cluster. Python and kubectl are all it takes."""
