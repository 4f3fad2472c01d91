"""What tests and the demo share: scratch hosts, a real guest, a private libvirtd, a real target."""
