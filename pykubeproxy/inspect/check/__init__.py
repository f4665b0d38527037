"""What `check` answers: findings about 1 to n nodes, each with advice."""
