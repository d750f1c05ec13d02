"""What `shoal bench` measures."""
