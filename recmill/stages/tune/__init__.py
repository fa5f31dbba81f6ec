"""Search recipes: quality against cost."""
