"""The view behind `kubectl pykubeproxy trace`: follow a packet over several nodes."""
