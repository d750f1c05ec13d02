"""A training loop of the user's own, from the loop's side and the daemon's; its front is `shoal.node.own_loop`."""
