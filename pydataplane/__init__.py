"""The Python side of the data plane: a typed client, supervision of a target, the volume model.

Knows nothing of libvirt or Kubernetes; the Rust programs themselves are under `crates/`.
"""
