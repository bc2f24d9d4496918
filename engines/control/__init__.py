"""Typed messages between processes, and their transport."""
