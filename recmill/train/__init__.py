"""train: Table -> model, on one machine."""
