"""What targets count, for people who look on and for Prometheus: read once, compared, named."""
