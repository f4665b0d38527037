"""The agent: takes events in, keeps the cluster's present state, and makes the tables follow it at a measured pace."""
