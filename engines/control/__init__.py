"""Typed messages between processes, and how they travel."""
