"""Tests of pydataplane.domain.translate: pure, without root, libvirtd or a target."""
