"""The image's recipe, proven without a container engine: python -m tests.image."""
