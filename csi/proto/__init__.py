"""Messages of CSI 1.13, the kubelet's plugin registration and KubeVirt's hooks; from schemas/.

Write them anew with `python -m csi.proto`; a test fails when they differ from the schemas.
"""
