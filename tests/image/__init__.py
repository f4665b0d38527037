"""Build and test the container image with podman: python -m tests.image."""
