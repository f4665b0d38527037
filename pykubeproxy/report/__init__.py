"""What commands answer: typed values, and their forms as JSON, YAML, names and text."""
