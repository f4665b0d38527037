"""The view behind `pykubeproxy explain`."""
