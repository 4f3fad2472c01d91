"""The VmVolume: a claim as a disk of a running virtual machine, for as long as the object exists.

    model, crd     the object, and its schema and CustomResourceDefinition made from it
    cache          what is known without asking; what may have changed is in a csi.queue
    observe        what is the case with one VmVolume
    decide, status what to do about it, and what to say: pure functions
    reconcile      observe, decide, act, until nothing is left to do
    metrics        for Prometheus
    controller     the threads: three watches and one worker

Each line uses those above it. Called by csi.cli; changes the target by csi.kubevirt.controllers.
"""
