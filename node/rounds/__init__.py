"""One node's part in rounds: the engine around the round machine, reductions, and what is decided between rounds."""
