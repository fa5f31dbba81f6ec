"""All stages in order; what is done already is not done again."""
