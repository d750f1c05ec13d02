"""SAPO: agents that learn from their own rollouts and from those that others share (arXiv 2509.08721)."""
