"""Kubernetes itself, real and whole, in a box: the CSI driver is tested on what users run it on.

`tools` builds the programs once, `sandbox` is the box, `cluster` brings Kubernetes up in it,
`driver` adds our target, our driver and the standard sidecars as processes, `installed` as pods,
and the tests use all of them. `e2e` is a suite of its own.
"""
