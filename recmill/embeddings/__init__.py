"""Dynamic embedding tables for CPU: one native record per key, with its row, optimizer state and history."""
