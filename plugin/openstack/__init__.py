"""Cinder's volumes as lvols: the driver `plugin.openstack.driver.VirtlunDriver`.

    driver                    what cinder-volume calls
    existing, volumetypes     what is there already, and what types say
    options, refusals         its options, and what goes wrong as Cinder's exceptions
    connection, loops         how a volume is attached: to a server of Nova, or to this host
    lvols                     Cinder's volumes and snapshots in an lvstore, each step repeatable

The last two lines do without Cinder, which the others import.
It runs in Cinder's own Python environment, where of virtlun's dependencies it needs SPDK's client
alone, and never talks to libvirt or the gateway: that takes the disk which Nova makes of the
connection.
"""
