"""Tests of pure Python: no root, no daemon."""
