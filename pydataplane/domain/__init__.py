"""What libvirt calls a domain, as plugin, hook and csi share it: its XML, and what it needs.

    names, errors   names that libvirt, the target and we agree on; what is refused, and why
    model           settings in, plans out
    xml             libvirt's XML of a domain, read
    translate       a client's XML to libvirtd's and back
    images          bdevs of disks over the network
    missing         disks whose volume is not there
    observed        what a target has
    reconcile       makes the target match a plan
    records         the hook's record of a domain's volumes

Standard library and pydataplane.errors only, for the hook is made of it. It talks to no libvirt and
no Kubernetes, and to a target by whatever client it is given. This file imports nothing: the hook
pays for each module that it reads.
"""
