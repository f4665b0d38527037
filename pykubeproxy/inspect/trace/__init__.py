"""What `trace` answers: where a connection goes over 1 to n nodes, as text, document or picture."""
