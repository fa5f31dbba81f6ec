"""Synthetic logs in each supported shape, with a planted truth."""
