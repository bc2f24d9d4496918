"""Latency profiles for paced mode; a discrete-event simulator of the live policies, not built yet, will share them."""
