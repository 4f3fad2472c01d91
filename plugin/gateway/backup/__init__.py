"""Backups of disks of ours: what libvirtd has a guest's QEMU do, a qemu-storage-daemon does here.

It reads lvol snapshots, which nobody changes, so the guest's QEMU has no part of it. Two of these
programs serve one backup: one that runs as the gateway does and reads the snapshots, and one that
runs as QEMU's user, because clients say which files it writes and where it listens.

- `launch`: how programs are started, and as whom;
- `daemon`: one qemu-storage-daemon, told by QMP;
- `marks`: the dirty bitmap of what is to be copied;
- `job`: one backup from its beginning to its end.
"""
