"""Many replicas: the core that decides, the workers that step, and the thread between them."""
