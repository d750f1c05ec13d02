"""Network of a swarm: libp2p host, lanes, discovery, members, transfer."""
