"""A discrete-event cluster for the same policies that run live, and the latency profiles it shares with paced mode."""
