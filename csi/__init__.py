"""The Kubernetes side: the CSI driver `csi.virtlun.dev` and the KubeVirt services.

One program, `virtlun-csi` (cli), serves CSI 1.13 on a UNIX socket beside the node's targets:

    request -> server (metrics, log, one error table) -> identity | controller | node
                                                            |           |
               volumes (ownership in the lvol's xattrs) <---+-----------+
                                                                        |
       hostdevice (an lvol as a block device), vhostface (as a socket), mounts (what there is)
                                                                        |
                              host (all that takes a right: loop devices, filesystems, mounting)

Beside volumes stand snapshots; contentsource, which makes volumes of snapshots and of volumes; and
volumelimits, how much I/O each may do.
Of several targets (targets) each volume's is that which has its lvstore.
What takes a right a second, small program does, `virtlun-csi-helper`: see the package host.
With --kubevirt it serves virtual machines as well: see the package kubevirt.

Every method of a service reads: validate, look up, act idempotently, respond. The driver keeps
no state: what a volume is stands in the lvol, what is attached and mounted is asked of the kernel.
It never talks to libvirt, and never touches an I/O.
"""

DRIVER_NAME = "csi.virtlun.dev"
TOPOLOGY_KEY = f"{DRIVER_NAME}/node"
POOL_KEY = f"{DRIVER_NAME}/pool-"
"""Begins the topology key of a pool of Ceph, before its UUID: nodes that have it say POOL_VALUE."""
POOL_VALUE = "true"
LVSTORE_KEY = f"{DRIVER_NAME}/lvstore"
"""Annotation of a PersistentVolume whose volume was moved: the UUID of the lvstore that it is in
(csi.moves)."""
RECEIVED_KEY = f"{DRIVER_NAME}/received"
"""Annotation of a PersistentVolume whose volume is to be taken over on another node: the last
snapshot that is sent there (csi.moves)."""
LUN_FINALIZER = "virtlun.dev/lun"
"""On a VmVolume from before its LUN is made until after it is gone; on its claim likewise."""
POD = "csi.storage.k8s.io/pod."
"""Begins the keys by which kubelet tells of the pod in a volume context (podInfoOnMount)."""
