"""Held-out users through the pipeline that will serve them: recall is fitted on eval, the list is measured on test."""
