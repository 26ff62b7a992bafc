"""Logs held against the law of the learner: its residuals, what would explain them, and the identities of the weights.

The public names are in `recording`; the room stands above the fields, so that these may ask for a check too.
"""
