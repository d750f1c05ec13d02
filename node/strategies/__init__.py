"""Parts of a node that each kind of strategy needs: rounds that are certified, in pairs, or of rollouts."""
