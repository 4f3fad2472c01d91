"""Tests, by what they need; see CONTRIBUTING.md."""
