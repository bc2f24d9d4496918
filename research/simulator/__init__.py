"""Rollouts in virtual time, decided by the live objects; and the latency profiles that they share with paced runs."""
