"""What the fleet counts, for Prometheus: read from Redis, so that it survives every process; see `collector`."""
