"""The driver over doubles of target and host."""
