"""What is trained: the workloads that come with Shoal."""
