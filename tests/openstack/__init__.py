"""Unmodified Nova on a gateway."""
