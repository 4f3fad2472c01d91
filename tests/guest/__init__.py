"""Tests with a real QEMU and a real Debian kernel, and the image they boot."""
