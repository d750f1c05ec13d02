"""The web page of a node: what it knows of its swarm, kept small, sent as it changes, and shown in a browser."""
