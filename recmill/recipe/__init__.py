"""What a recipe is, reading and checking one; shipped recipes."""
