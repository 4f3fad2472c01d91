"""The compute container's libvirtd: real, in a mount namespace that has what the container has.

virt-launcher runs virtqemud and QEMU inside of its container, with what kubelet gave it. Here both
are the machine's own, in the node's box, and their namespace has at the container's paths

- /dev/NAME: a node of the block device that kubelet published for the volume, of user 107,
- every mount of the container's volumes, bound from the pod's own directory: /var/run/virtlun,
  /var/run/kubevirt-private, ..., and Filesystem claims,
- the QEMU program that the container has,

and of the node's /dev and /run nothing else but the usual character devices. As there, QEMU is user
and group 107 and libvirt changes no owner of anything. Unlike there, libvirtd is root.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.kubevirt.objects import NON_ROOT, QEMU
from tests.kubernetes.sandbox import Process, Sandbox, SandboxError
from tests.support.cache import CACHE
from tests.support.libvirtd import LIBVIRTD_CONF, VirshError, qemu_log, virsh
from tests.support.wait import listens, until

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
START_DEADLINE_S = 60.0
QEMU_CONF = f"""\
user = "+{NON_ROOT}"
group = "+{NON_ROOT}"
dynamic_ownership = 0
remember_owner = 0
cgroup_controllers = []
namespaces = []
security_driver = "none"
stdio_handler = "file"
vnc_auto_unix_socket = 0
"""
SETUP = """\
mount -t tmpfs -o mode=755 dev {scratch}/dev
for name in {devices}; do
    touch {scratch}/dev/$name && mount --bind /dev/$name {scratch}/dev/$name
done
mkdir {scratch}/dev/pts {scratch}/dev/shm
mount --rbind /dev/pts {scratch}/dev/pts
mount -t tmpfs -o mode=1777 shm {scratch}/dev/shm
ln -s pts/ptmx {scratch}/dev/ptmx
{nodes}
mount --rbind {scratch}/dev /dev
mount -t tmpfs -o mode=755 run /run
{mounts}
exec /usr/sbin/libvirtd -p {scratch}/libvirtd.pid
"""


class Compute:
    """libvirtd of one launcher pod."""

    def __init__(
        self,
        box: Sandbox,
        scratch: Path,
        pod: Mapping[str, Any],
        folder: Path,
        persistent: Mapping[str, str],
        qemu: Path,
    ) -> None:
        """Starts it for the pod whose directory is `folder`.

        `persistent` are the names of the persistent volumes by claim. Raises SandboxError with
        libvirtd's words where it does not start.
        """
        self.box = box
        self.scratch = scratch
        #: The host's places of what the container has mounted, by path in it.
        self.mounted = container_mounts(pod, folder, persistent)
        self.socket = scratch / "run/libvirt-sock"
        (scratch / "dev").mkdir(parents=True)
        (scratch / "run").mkdir()
        binds = {"/usr/bin/qemu-system-x86_64": qemu}
        cache = CACHE / f"libvirt-compute-{'plain' if qemu == QEMU else qemu.name}"
        cache.mkdir(parents=True, exist_ok=True)
        for name, place in {
            "etc": "/etc/libvirt",
            "lib": "/var/lib/libvirt",
            "log": "/var/log/libvirt",
            "run-libvirt": "/run/libvirt",
        }.items():
            (scratch / name).mkdir()
            binds[place] = scratch / name
        binds["/var/cache/libvirt"] = cache
        binds |= self.mounted
        (scratch / "etc/libvirtd.conf").write_text(
            LIBVIRTD_CONF.format(
                run=scratch / "run",
                log=scratch / "libvirtd.log",
                max_clients=200,
                uuid=pod["metadata"]["uid"],
                extra="",
            ).replace('unix_sock_group = "libvirt"\n', "")
        )
        (scratch / "etc/qemu.conf").write_text(QEMU_CONF)
        self.process = self._spawn(binds, self._devices(pod, folder, persistent))

    def _devices(
        self, pod: Mapping[str, Any], folder: Path, persistent: Mapping[str, str]
    ) -> dict[str, str]:
        """Returns "MAJOR MINOR" of the container's block devices, by path in it."""
        found = {}
        for device in compute_of(pod).get("volumeDevices", []):
            volume = persistent[_claim(pod, device["name"])]
            place = folder / "volumeDevices/kubernetes.io~csi" / volume
            numbers = self.box.run("stat", "-L", "-c", "%Hr %Lr", place).stdout
            found[device["devicePath"]] = numbers.strip()
        return found

    def _spawn(self, binds: Mapping[str, Path], devices: Mapping[str, str]) -> Process:
        nodes = []
        for path, numbers in devices.items():
            node = shlex.quote(f"{self.scratch}{path}")
            nodes.append(f"mknod {node} b {numbers}")
            nodes.append(f"chown {NON_ROOT}:{NON_ROOT} {node}")
        mounts = []
        for place, source in sorted(binds.items()):
            quoted = shlex.quote(place)
            make = "mkdir -p" if source.is_dir() else "touch"
            mounts.append(f"[ -e {quoted} ] || {make} {quoted}")
            mounts.append(f"mount --bind {shlex.quote(str(source))} {quoted}")
        script = SETUP.format(
            scratch=self.scratch,
            devices=" ".join(DEVICES),
            nodes="\n".join(nodes),
            mounts="\n".join(mounts),
        )
        process = self.box.spawn(
            self.scratch.name,
            *("unshare", "--mount", "--propagation", "slave", "sh", "-ec", script),
        )

        def ready() -> bool:
            if not process.running():
                raise SandboxError(f"libvirtd ended: {self.words(process)}")
            return listens(self.socket)

        try:
            until(ready, "libvirtd of a launcher", deadline_s=START_DEADLINE_S)
        except (SandboxError, AssertionError):
            process.stop()
            raise
        return process

    def words(self, process: Process | None = None) -> str:
        """Returns the end of what it said."""
        log = self.scratch / "libvirtd.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        return (process or self.process).words() + text[-3000:]

    def virsh(self, *words: str, check: bool = True, deadline_s: float = 90.0) -> str:
        """Runs plain virsh against it, for `deadline_s` seconds at most."""
        uri = f"qemu+unix:///system?socket={self.socket}"
        return virsh(uri, *words, check=check, deadline_s=deadline_s)

    def state(self, domain: str) -> str:
        """Returns what virsh says of a domain's state; nothing where it is not defined."""
        try:
            return self.virsh("domstate", domain)
        except VirshError:
            return ""

    def define(self, xml: bytes) -> None:
        """Defines a domain; VirshError where libvirt does not take it."""
        file = self.scratch / "domain.xml"
        file.write_bytes(xml)
        self.virsh("define", str(file))

    def qemu_log(self, domain: str) -> str:
        """Returns what libvirt logged of QEMU: its command line and its words."""
        return qemu_log(self.scratch, domain)

    def stop(self) -> None:
        """Ends libvirtd and what it runs, as the container's end does."""
        for pid_file in (self.scratch / "run-libvirt/qemu").glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                self.box.run("kill", "-KILL", pid_file.read_text().strip(), check=False)
        self.process.stop()


def compute_of(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the compute container of a launcher pod."""
    (found,) = (one for one in pod["spec"]["containers"] if one["name"] == "compute")
    return dict(found)


def _claim(pod: Mapping[str, Any], volume: str) -> str:
    (found,) = (one for one in pod["spec"]["volumes"] if one["name"] == volume)
    return str(found["persistentVolumeClaim"]["claimName"])


def container_mounts(
    pod: Mapping[str, Any], folder: Path, persistent: Mapping[str, str]
) -> dict[str, Path]:
    """Returns where on the host the mounts of a pod's compute container are, by path in it.

    Claims of mode Block are devices and not among them; the QEMU program is not either.
    """
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    found = {}
    for mount in compute_of(pod)["volumeMounts"]:
        name = mount["name"]
        if "emptyDir" in volumes[name]:
            place = folder / "volumes/kubernetes.io~empty-dir" / name
        elif "csi" in volumes[name]:
            place = folder / "volumes/kubernetes.io~csi" / name / "mount"
        elif "persistentVolumeClaim" in volumes[name]:
            volume = persistent[_claim(pod, name)]
            place = folder / "volumes/kubernetes.io~csi" / volume / "mount"
        else:
            continue  # the service account's token, and QEMU
        found[mount["mountPath"]] = place / mount.get("subPath", "")
    return found
