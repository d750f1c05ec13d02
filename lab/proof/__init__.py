"""All that the project claims in figures, each with the command that proves it."""
