"""What a node does under each kind of strategy: rounds that are certified, in pairs, or of rollouts."""
