"""Stage: is this recipe right, and do its files parse?"""
