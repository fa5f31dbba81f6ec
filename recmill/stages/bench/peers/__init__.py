"""Contestants of `recmill bench train`, one file each, each run in a process of its own.

They import each other relatively and recmill only where they measure it, so that an interpreter which has the peer's
packages and not recmill runs them as `peers.NAME` from the folder above.
"""
