"""The Kubernetes side: the CSI driver and the KubeVirt services."""
