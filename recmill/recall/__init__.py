"""Recall channels that are fitted to interactions, and the fusion of several channels' lists."""
