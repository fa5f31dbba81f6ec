"""Bundles, which servers open: graphs, embedding rows, the Plan, an index, users and items."""
