"""KubeVirt's part towards a storage driver, simulated, with all that is storage real.

KubeVirt cannot run here: it comes as images only. So this package does what its components do, in
their order and with their arguments, read from the source of v1.9 (and 1.8 for the legacy hook, and of pull request 19160 for the launcher
hooks of 1.10).

| simulated, by this package | real |
| --- | --- |
| virt-controller: the instance, the launcher pod, the status that others read | API server, admission, kubelet, containerd, the pod and its volumes |
| virt-handler: when node hooks are called, and with which instance | the hook's server, in our driver, on its socket of the node |
| virt-launcher: the domain's XML, when domain hooks are called, define and start | the sidecar in the pod, libvirtd, QEMU (TCG), SeaBIOS, a Debian kernel as guest |
| a migration: who asks whom, and when, on two nodes | the scheduler's choice, both pods, libvirt's migration of the domain |
| CDI: a pod that writes an image to a claim | the claim, the pod |

`objects` are its kinds and pods, `domain` the XML, `compute` the container's libvirtd, `wire` its
side of the hook protocols, `simulator` virt-controller's and virt-handler's loops (with a table of
the hook points), `launcher` virt-launcher, `migration` an attempt to migrate, `importer` CDI.

`installed` is virtlun on it, from the examples; a plugin's condition is evaluated by the API
server's CEL (`conditions`). Not simulated: the objects, queues and timeouts of migrations, KubeVirt's
own hot-plug, the guest agent, networks.
"""  # noqa: E501
