"""Where members of a swarm find each other: the local network, a Kademlia table, hivemind's."""
