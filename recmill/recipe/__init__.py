"""The recipe: its definition, parsing and validation; shipped recipes."""
