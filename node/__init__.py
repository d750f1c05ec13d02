"""One node's life: daemon, trainer process, workloads, state on disk."""
