"""virtlun-gateway: a proxy of libvirt's RPC socket that knows virtlun disks.

A client connects to the gateway's socket instead of libvirtd's and notices nothing else. Messages
pass through as they are, except the calls about disks of ours (see `handlers`): those are answered
here, or rewritten on their way by `pydataplane.domain.translate`.

    wire, xdr, messages, procs   the protocol: framing, values, numbers
    errors, peer, polkit         refusals; who a client is, and what it may do
    libvirtdconf, listen         what libvirtd.conf says of clients; sockets
    manager, heap                what systemd is told; how the C library keeps memory
    incoming, outgoing, channel  what a socket received; what it is sent; messages over it
    sasl                         who we are for a libvirtd that asks for it
    upstream, admin              a small libvirt client, for calls of our own
    secrets                      values of libvirt's secrets
    batching                     questions of many callers at the same time, asked in batches
    usage                        what guests did with disks
    latencies                    how long it took
    blocklimits                  what requests of disks have to be like
    domaindisks                  a domain's controllers and disks in one target
    lvolsnapshots                what snapshots of domains need of a target
    lvolcheckpoints              their checkpoints, which are lvol snapshots, too
    lvolchain                    the snapshots that a volume is made of, merged
    lvolcopies                   copies of volumes that guests use
    target, answers, targets     LUNs and volumes, of one target and of all
    locks                        one operation at a time, by the name of what it changes
    storage                      lvstores as pools of libvirt's, and their volumes
    backup                       what lvol snapshots have is copied, or served
    statistics, guestdisks       results of GET_ALL_DOMAIN_STATS and of the guest agent, in bytes
    parsing, budget              threads for XML, and memory for calls: whose turn it is
    events, journal              device events; changes under way, on disk
    blockjobs                    jobs of disks of ours
    eventfilter                  suppresses the events of definitions that we replace
    domains                      questions to a domain's XML
    xmlcache, domaincache        caches: XML as clients see it; which disks of ours domains have
    thresholds                   what disks may have allocated before clients want to hear of it
    domstats                     statistics of domains, as clients see them
    imagegrants                  which images a client with the right to them had opened
    autoresume                   domains that resume when an lvstore has space again
    streams                      data of a call, after its reply
    caller, services, call       what handlers get: the client, the gateway's parts, one call
    ioerrors                     domains paused because a disk of ours cannot go on
    inflight                     refuses to save those whose in-flight requests would be lost
    thresholdwatch               clients are told when disks have more than that
    records                      which volumes a domain has had
    images                       images of other hosts, opened for the domains that have them
    copies                       copies of disks, from their begin to their end
    domsnapshots, freezing       libvirtd's snapshots; guests' file systems, frozen for them
    snapshotsteps                their steps, which are done again
    domcheckpoints               checkpoints of a domain
    protection                   guests that carry protection information
    emptycontrollers             controllers of domains without a disk of ours
    reconcile, recovery          the target follows the domains; interrupted changes
    runningbackups               backups, one for each domain
    loop                         what is done again and again, and when domains stop
    handlers, procedures         what we do with which call, and who may make it
    admission                    the calls that lead to an open connection
    session, server              one client's two pumps; the process

Each line uses those above it, never those below.

It owns no state but the journal of what is under way: a domain's disks stand in its metadata, the
LUNs in the target. It never touches an I/O, and it never decides what a client may do: libvirtd
does, for each call, under the client's own identity.
"""
