"""How a swarm synchronises: an object for each strategy, behind one interface, and the table of them."""
