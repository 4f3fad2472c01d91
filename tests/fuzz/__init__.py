"""Fuzzing of every boundary with a hostile peer: `python -m tests.fuzz`."""
