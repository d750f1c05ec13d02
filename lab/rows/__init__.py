"""More peers than one plan takes: rows that reduce by themselves, and sums of their means; simulated only."""
