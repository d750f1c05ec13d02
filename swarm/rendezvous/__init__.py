"""Rendezvous of a swarm's members: the local network, a Kademlia table, hivemind's."""
