"""Network namespaces, and links between them that are narrow, long or lossy."""
