"""Measurements: ours beside others' targets, driven by the same initiator."""
