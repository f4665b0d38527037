"""What `explain` answers: which endpoints a Service uses on 1 to n nodes, and why."""
