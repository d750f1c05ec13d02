"""The trainer, in a process or several of its own, and the daemon's side of it."""
