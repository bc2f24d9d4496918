"""Weights that travel by a relay: pushed once, pulled by whoever needs them."""
