"""What peers say to each other, and the pure machines that decide what it means."""
