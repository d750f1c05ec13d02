"""A swarm of real node processes on this machine, its faults, and the check of its values."""
