"""Reachability: addresses that can be reached, and ways through members and routers in between."""
