"""The agent: applies events to the state of the cluster, and syncs the tables with it at a limited rate."""
