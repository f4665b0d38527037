"""The view behind `pykubeproxy dump-rules`."""
