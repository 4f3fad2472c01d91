"""Tests of domain.translate: pure, without root, libvirtd or a target."""
