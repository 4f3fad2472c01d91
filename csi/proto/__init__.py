"""Messages of CSI 1.13 and of the kubelet's plugin registration, generated from schemas/.

Write them anew with `python -m csi.proto`; a test fails when they differ from the schemas.
"""
