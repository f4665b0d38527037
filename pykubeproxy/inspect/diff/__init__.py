"""The view behind `pykubeproxy diff`."""
