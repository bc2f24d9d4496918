"""ROSE: rollouts that borrow GPUs of a serving cluster."""
