"""Tests of plugin.translate: pure, without root, libvirtd or a target."""
