"""Random schedules of what can go wrong in a rollout, each replayable from one integer; see `__main__`."""
