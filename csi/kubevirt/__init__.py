"""Virtual machines of KubeVirt: their volumes as LUNs of one vhost-user-scsi controller each.

Where QEMU has no vhost-user-scsi, a claim is a virtio-blk disk with a controller of its own.

    kubelet ---- inline volume ----> inline ------\
    virt-handler -- node hooks ----> nodehook ----+--> controllers --> the node's targets
    VmVolume objects (vmvolume) ------------------/
    virt-launcher -- domain hooks --> sidecar (a program of its own in the launcher's pod)

`controllers` is the only one that changes a target, each pod's own by `podcontrollers`; `placement`
chooses it when the inline volume is published. `nodehook` decides which volumes of a
starting machine become LUNs or disks, and writes it into `document`, which the sidecar reads in the
controller's folder, where it finds the socket as well.
"""
