"""Replay of held-out users: recall is fitted on eval, the served list is measured on test."""
