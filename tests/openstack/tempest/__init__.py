"""Tempest's tests of volumes."""
