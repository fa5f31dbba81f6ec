"""What a server answers from: graphs, embedding rows, the Plan, an index, users and items."""
