"""Recall channels that are fitted to interactions, and how the lists of several channels become one."""
