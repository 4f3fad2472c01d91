"""Unit tests of the VmVolume controller, against fakes."""
