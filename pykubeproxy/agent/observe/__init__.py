"""What the agent shows of itself: health, metrics, events, status, logs of syncs."""
