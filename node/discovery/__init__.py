"""Discovery: a node finds its swarm, is let in, and comes to be reachable."""
