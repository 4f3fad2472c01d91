"""A machine with Debian's systemd as its first process, in namespaces of its own.

It has a root of its own on a tmpfs, of which only /usr, our sources and the tests' Python packages
are the host's, read-only. The host's root is taken away (pivot_root(2)) before systemd starts: what
systemd cleans, mounts or writes is here and ends with it. `/proc/sys` and `/sys` are read-only, so
no setting of the kernel changes. The control group is one of version 2, which every kernel has
beside those of version 1. Nothing of the distribution starts by itself but the journal.

`/opt/virtlun` is as examples/systemd/README.md installs it, with the programs that were built; what
pip would copy there is the checkout. Debian's own Python runs it, as there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from tests.support.target import ROOT, binary
from tests.support.wait import until

SYSTEMD = Path("/lib/systemd/systemd")
PYTHON = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
INSTALLED = Path("/opt/virtlun")
BOOT = "tests.target"
"""What is started at boot: nothing of the distribution's."""
PROGRAMS = ("virtlun-target", "virtlun-holder", "virtlun-bench")
ETC = (
    *("passwd", "group", "shadow", "gshadow", "nsswitch.conf", "ld.so.cache", "ld.so.conf"),
    *("ld.so.conf.d", "alternatives", "pam.d", "security", "libvirt", "login.defs"),
)
"""Of the host's /etc, copied."""
DROPPED = "-sys_time,-sys_module,-sys_rawio,-syslog,-wake_alarm,-mac_admin,-mac_override,-bpf"
"""Capabilities that are about the whole machine."""
MASKED = ("systemd-machined.service",)
"""Started by others, and no use without D-Bus."""
CLONE_NEWNET = 0x40000000
BOOT_DEADLINE_S = 90.0
DEADLINE_S = 120.0

#: In a mount namespace of its own: makes a control group, enters it, and goes on in what follows.
GROUP = """\
mount -t cgroup2 cgroup2 {scratch}/cgroup
mkdir {scratch}/cgroup/{name}
echo $$ >{scratch}/cgroup/{name}/cgroup.procs
umount {scratch}/cgroup
exec unshare --cgroup --mount --pid --net --uts --ipc --propagation private --fork --kill-child \
    sh -euc {inner}
"""

#: Removes it, and what is left below it.
UNGROUP = """\
mount -t cgroup2 cgroup2 {scratch}/cgroup
[ ! -d {scratch}/cgroup/{name} ] || find {scratch}/cgroup/{name} -depth -type d -exec rmdir {{}} +
"""

#: As the first process of all new namespaces: builds the root, enters it, and becomes systemd.
SETUP = """\
umask 022
root={scratch}/root
mount -t tmpfs -o mode=755 root $root
mkdir -p $root/dev $root/etc $root/mnt $root/opt $root/proc $root/root $root/run $root/sys \
    $root/home $root/srv $root/tmp $root/usr $root/var/lib $root/var/log $root/var/tmp $root/host
chmod 1777 $root/tmp $root/var/tmp
ln -s ../run $root/var/run
mount --bind -o ro /usr $root/usr
mount -t tmpfs -o ro generators $root/usr/lib/systemd/system-generators
mount -t tmpfs -o mode=755 local $root/usr/local
mkdir $root/usr/local/bin $root/usr/local/sbin
mount --bind {scratch}/var-lib $root/var/lib
for folder in /bin /sbin /lib*; do
    if [ -L $folder ]; then
        cp -P $folder $root/
    else
        mkdir $root$folder
        mount --bind -o ro $folder $root$folder
    fi
done
cp -a {scratch}/etc $root/
cp -a {scratch}/virtlun $root/opt/
mount --bind -o ro {source} $root{installed}/source
mount --bind -o ro {packages} $root{installed}/packages
mount -t tmpfs -o mode=755,nosuid dev $root/dev
mkdir $root/dev/pts $root/dev/shm
mknod -m 666 $root/dev/null c 1 3
mknod -m 666 $root/dev/zero c 1 5
mknod -m 666 $root/dev/full c 1 7
mknod -m 666 $root/dev/random c 1 8
mknod -m 666 $root/dev/urandom c 1 9
mknod -m 666 $root/dev/tty c 5 0
mknod -m 666 $root/dev/fuse c 10 229
mount -t devpts -o newinstance,ptmxmode=666 devpts $root/dev/pts
ln -s pts/ptmx $root/dev/ptmx
ln -s /proc/self/fd $root/dev/fd
mount -t tmpfs -o mode=1777 shm $root/dev/shm
mount -t proc proc $root/proc
mount --bind -o ro $root/proc/sys $root/proc/sys
for file in $root/proc/sysrq-trigger; do
    [ ! -e $file ] || mount --bind -o ro $file $file
done
mount -t sysfs -o ro sysfs $root/sys
mount -t cgroup2 cgroup2 $root/sys/fs/cgroup
mount -t tmpfs -o mode=755,nosuid,nodev run $root/run
hostname virtlun-tests
cd $root
pivot_root . host
umount -l /host
rmdir /host
# Never on a root that is somebody else's.
[ "$(stat -f -c %T /)" = tmpfs ]
[ ! -e /host ]
mount --make-rshared /
exec env -i container=virtlun-tests PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin \
    LANG=C.UTF-8 setpriv --bounding-set={dropped} --inh-caps=-all {systemd} --unit={boot}
"""

JOURNAL = "[Journal]\nStorage=volatile\nForwardToSyslog=no\nReadKMsg=no\nAudit=no\n"
TARGET = "[Unit]\nRequires=basic.target\nAfter=basic.target\nAllowIsolate=yes\n"


class MachineError(Exception):
    """The machine, or a program in it, did not do what it should; the text has its words."""


class Machine:
    """A booted machine; a context manager that ends all of it. Needs root."""

    def __init__(self, scratch: Path) -> None:
        """Boots it. `scratch` is an empty folder, for its own use.

        Raises:
            MachineError: something is missing here, or systemd did not come up.
        """
        if os.geteuid() != 0:
            raise MachineError("systemd needs namespaces and mounts: run as root")
        for needed in (SYSTEMD, PYTHON):
            if not needed.exists():
                raise MachineError(f"{needed} is missing: `make setup` installs what tests need")
        self.scratch = scratch
        self.log = scratch / "systemd.log"
        self._name = f"virtlun-{scratch.name}"
        self._pid = 0
        self._prepare()
        names = {
            "scratch": scratch,
            "name": self._name,
            "source": ROOT,
            "packages": sysconfig.get_path("purelib"),
            "installed": INSTALLED,
            "dropped": DROPPED,
            "systemd": SYSTEMD,
            "boot": BOOT,
        }
        outer = GROUP.format(inner=shlex.quote(SETUP.format(**names)), **names)
        with self.log.open("wb") as log:
            self._first = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--mount", "--propagation", "private", "sh", "-euc", outer),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            until(self._booted, self.words, BOOT_DEADLINE_S)
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Writes what of the root is not the host's: /etc and /opt/virtlun."""
        for name in ("root", "cgroup", "etc", "virtlun", "var-lib"):
            (self.scratch / name).mkdir()
        etc = self.scratch / "etc"
        copied = [f"/etc/{name}" for name in ETC if Path("/etc", name).exists()]
        subprocess.run(["cp", "-a", *copied, str(etc)], check=True)
        (etc / "machine-id").write_text(f"{os.urandom(16).hex()}\n")
        (etc / "os-release").symlink_to("../usr/lib/os-release")
        units = etc / "systemd/system"
        units.mkdir(parents=True)
        (etc / "systemd/journald.conf").write_text(JOURNAL)
        (units / BOOT).write_text(TARGET)
        started = {path.name for path in Path("/usr/lib/systemd/system").glob("*.target.wants/*")}
        for name in (*started, *MASKED):
            if not name.startswith("systemd-journald") or "audit" in name:
                (units / name).symlink_to("/dev/null")
        folder = self.scratch / "virtlun"
        for name in ("bin", "source", "packages"):
            (folder / name).mkdir()
        for name in PROGRAMS:
            shutil.copy(binary(name), folder / "bin" / name)
        (folder / "bin/python3").symlink_to(PYTHON)
        (folder / "pyvenv.cfg").write_text(f"home = {PYTHON.parent}\n")
        site = folder / "lib" / PYTHON.name / "site-packages"
        site.mkdir(parents=True)
        (site / "virtlun.pth").write_text(f"{INSTALLED}/source\n{INSTALLED}/packages\n")
        for entry in entry_points(group="console_scripts"):
            if entry.dist is not None and entry.dist.name == "virtlun":
                script = folder / "bin" / entry.name
                script.write_text(
                    f"#!{INSTALLED}/bin/python3\nimport sys\n\n"
                    f"from {entry.module} import {entry.attr}\n\nsys.exit({entry.attr}())\n"
                )
                script.chmod(0o755)

    def _booted(self) -> bool:
        """Whether systemd has started what it is to start; MachineError if it ended."""
        if self._first.poll() is not None:
            raise MachineError(f"systemd did not start here:\n{self.words()}")
        pid = self._first.pid
        inner = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not inner or Path(f"/proc/{inner[0]}/exe").readlink().name != SYSTEMD.name:
            return False
        self._pid = int(inner[0])
        state = self.run("systemctl", "is-active", BOOT, check=False).stdout.strip()
        return state == "active"

    def words(self, last: int = 4000) -> str:
        """Returns the last characters of what systemd and its setup said."""
        return self.log.read_text(errors="replace")[-last:]

    def command(self, *words: str | Path) -> list[str]:
        """Returns the command line that runs `words` in the machine."""
        names = ("--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup")
        clean = ("env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8")
        box = ["nsenter", "--target", str(self._pid), *names, "--"]
        return [*box, *clean, *(str(word) for word in words)]

    def run(
        self, *words: str | Path, check: bool = True, deadline_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program in the machine to its end; MachineError where it fails and `check`."""
        done = subprocess.run(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise MachineError(f"{' '.join(map(str, words))}:\n{done.stdout}{done.stderr}")
        return done

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """Has this thread in the machine's network for the duration of a block.

        What it starts meanwhile, programs and threads, stays there.
        """
        machines = Path(f"/proc/{self._pid}/ns/net")
        with Path("/proc/thread-self/ns/net").open() as own, machines.open() as entered:
            _enter_network(entered.fileno())
            try:
                yield
            finally:
                _enter_network(own.fileno())

    def path(self, inside: str | Path) -> Path:
        """Returns where a path of the machine is to be found from outside."""
        return Path(f"/proc/{self._pid}/root{inside}")

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Returns properties of a unit, as `systemctl show` has them."""
        said = self.run("systemctl", "show", f"--property={','.join(names)}", unit).stdout
        return dict(line.split("=", 1) for line in said.splitlines())

    def journal(self, unit: str) -> str:
        """Returns what the unit's processes and systemd said of it."""
        return self.run("journalctl", "--no-pager", f"--unit={unit}").stdout

    def said(self) -> str:
        """Returns the whole journal of this boot."""
        return self.run("journalctl", "--no-pager", "--boot").stdout

    def status(self, pid: str | int) -> Mapping[str, str]:
        """Returns /proc/PID/status of a process of the machine, by the id that it has there."""
        text = self.path(f"/proc/{pid}/status").read_text()
        return {name: value.strip() for name, value in (s.split(":", 1) for s in text.splitlines())}

    def close(self) -> None:
        """Kills everything in the machine; its mounts and its control group go too."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
        else:
            self._first.kill()
        self._first.wait(DEADLINE_S)
        script = UNGROUP.format(scratch=self.scratch, name=self._name)
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", script]
        until(lambda: subprocess.run(command, check=False).returncode == 0, "an empty group")

    def __enter__(self) -> Machine:
        """Returns the machine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self.close()


def _enter_network(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the machine's network namespace")
