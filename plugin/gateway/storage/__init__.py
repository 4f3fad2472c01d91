"""Each lvstore, and each pool of Ceph or of an array's LUNs, as a storage pool of libvirt's.

    refs        how libvirt's protocol names pools and volumes
    states      which of our pools are stopped or undefined
    openexport  a volume that is exported as a file: its begin and end in a target
    leftovers   notes of open exports: those that are cut off are ended later
    pools       what our pools are, found by name and UUID
    xml         their XML and that of their volumes, shown and read
    exports     volumes as files
    volumes     what is done to volumes, in a target
    rights      what polkit is asked about them
    events      what clients are told of pools

Such a pool is named as `<source pool=>` of a domain's disk names it: the prefix of the
configuration (`virtlun-`) and the lvstore's name; its UUID is the lvstore's. So a pool is known as
ours by its name alone, and what is of others costs nothing. Names that begin so are ours: libvirtd
gets no new pool of such a name, and where it has one from before, the lvstore's counts.

To clients a pool is of type `zfs`, the one type of libvirt's whose volumes are thin block devices
on what is no folder: of a `logical` pool virt-install has each volume allocated as a whole, and in
a `dir` it makes qcow2 files.

A pool is the view on an lvstore, never the lvstore itself: stopped or undefined it is hidden, its
volumes and the domains that use them are as they were, and no call on a pool deletes data. After
the host's next start it is there again.
"""
