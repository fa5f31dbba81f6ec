"""Features of users and items in Redis."""
