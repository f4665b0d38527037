"""Find service ports whose rules iptables rejects, and keep them from blocking all others."""
