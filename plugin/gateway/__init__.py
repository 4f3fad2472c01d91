"""virtlun-gateway: a proxy of libvirt's RPC socket that knows virtlun disks.

A client connects to the gateway's socket instead of libvirtd's and notices nothing else. Messages
pass through as they are, except the calls about disks of ours (see `handlers`): those are answered
here, or rewritten on their way by `plugin.translate`.

    wire, xdr, messages, procs   the protocol: framing, values, numbers
    channel                      one socket: messages, descriptors, backpressure
    upstream, admin              a small libvirt client, for calls of our own
    caller, peer, polkit         who a client is, and what it may do
    services, call               what handlers get: the gateway's parts, one call of one client
    handlers, domains            what we do with which call
    target, locks, events        LUNs and volumes; one operation at a time; device events
    reconcile, recovery, loop    the target follows the domains; interrupted changes
    journal, records             changes under way on disk; which volumes a domain has had
    session, server, listen      one client's two pumps; the process

Each line uses those above it, never those below.

It owns no state but the journal of what is under way: a domain's disks stand in its metadata, the
LUNs in the target. It never touches an I/O, and it never decides what a client may do: libvirtd
does, for each call, under the client's own identity.
"""
