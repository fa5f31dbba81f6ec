"""Synthetic logs in each supported format, with a planted truth."""
