"""Tests with a real libvirtd and a real virsh."""
