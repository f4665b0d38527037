"""The view behind `pykubeproxy trace`."""
