"""The protocol's machines in virtual time: thousands of peers, or thousands of seeds."""
