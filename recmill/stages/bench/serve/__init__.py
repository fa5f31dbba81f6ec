"""bench serve: asks a running server as many users would, and says how fast and how well it answers."""
