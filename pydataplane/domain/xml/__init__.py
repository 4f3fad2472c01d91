"""libvirt's XML of a domain, read: the disks, our metadata, our controller. Imports nothing itself.

document   XML as text with positions, and edits of it that keep every other byte
disk       one <disk>: what of it concerns us
metadata   our element in <metadata>: the disks of ours, as the client wrote them
carrier    the <disk type='vhostuser'> and <qemu:override> that stand for our controller
boot       which disk the firmware boots
view       a whole domain: all of these, and its plan
"""
