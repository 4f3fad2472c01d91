"""The Python side of the data plane: a typed client, supervision of a target, the volume model.

`domain` is what the sides above share of libvirt's domains, and `emulator` of QEMU's programs;
nothing else here knows libvirt, and nothing at all Kubernetes. The Rust programs themselves are
under `crates/`.
"""
