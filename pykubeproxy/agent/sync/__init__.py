"""One sync of one family: compute the update, write it, report what was done."""
