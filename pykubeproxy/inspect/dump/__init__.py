"""What `dump-rules` answers: the services, endpoints and shares in the rules of 1 to n nodes."""
