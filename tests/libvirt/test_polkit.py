"""A real polkitd decides: through the gateway everybody gets what libvirtd itself grants, no more.

libvirtd asks it who may connect (auth_unix_rw) and about each call (access_drivers). Each of the
users does the same things twice, to libvirtd with disks of its own kind and through the gateway
with ours; what is refused at one must be at the other, and then nothing has changed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.libvirt.test_foreign_domains import MADE_UP
from tests.support.domain import domain_xml
from tests.support.gateway import GatewayProcess
from tests.support.host import Host, is_root, scratch_directory
from tests.support.night import by_day
from tests.support.polkit import Polkit

pytestmark = [pytest.mark.root, pytest.mark.vm]

MIB = 1 << 20

RIGHTS: dict[str, str] = {
    "man": "connect.* domain.getattr domain.read",
    "mail": "connect.* domain.getattr domain.read domain.write@mine domain.save@mine",
    "news": "connect.* domain.getattr domain.read domain.write",
    "uucp": "connect.* domain.getattr domain.start@mine",
    "backup": "connect.* domain.getattr domain.block-write@mine",
    "proxy": "connect.* domain.getattr domain.write@mine domain.save@mine",
    "lp": "connect.* domain.getattr domain.read domain.snapshot@mine domain.checkpoint@mine",
    "list": "connect.* domain.*@mine",
    "www-data": "",
}
"""Debian's own users to what they may do; `@mine`: to domains whose name begins so."""

BY_DAY = ("mail", "list", "www-data")
"""Of these: who may write, do all with some domains, and nothing."""

SHUT_OUT = "games"
"""Another of Debian's users, who may do anything to domains, but may not connect."""

CHANGING = [user for user in RIGHTS if user not in ("www-data", "uucp")]
"""Those who may change something, and one who may only read."""

RULES = """\
var rights = {rights};
polkit.addRule(function(action, subject) {{
    var id = action.id.replace("org.libvirt.api.", "");
    if (id == action.id && action.id.indexOf("org.libvirt.unix.") != 0)
        return polkit.Result.NOT_HANDLED;
    var granted = rights[subject.user];
    if (granted === undefined)
        return polkit.Result.NO;
    if (id == action.id)
        return granted ? polkit.Result.YES : polkit.Result.NO;
    var mine = String(action.lookup("domain_name")).indexOf("mine") == 0;
    var found = granted.split(" ").some(function(right) {{
        var parts = right.split("@");
        if (parts.length > 1 && !mine)
            return false;
        return parts[0] == id || parts[0] == id.split(".")[0] + ".*";
    }});
    return found ? polkit.Result.YES : polkit.Result.NO;
}});
"""

DENIED = "access denied|authentication (failed|unavailable)|failed to get domain"
"""What virsh says then."""

LIBVIRTD_CONF = (
    'unix_sock_rw_perms = "0777"\nauth_unix_rw = "polkit"\naccess_drivers = ["polkit"]\n'
)


def others_at_night(users: Iterable[str], by_day: tuple[str, ...] = BY_DAY) -> list[Any]:
    """Returns users as parameters; those who are not `by_day` have their turn at night."""
    return [
        pytest.param(user, marks=[] if user in by_day else [pytest.mark.nightly]) for user in users
    ]


@dataclass
class Policed:
    """A host whose libvirtd asks polkit, and a gateway that is open to all users."""

    host: Host
    gateway: Path

    def uri(self, direct: bool) -> str:
        return self.host.libvirtd.uri(None if direct else self.gateway)

    def do(self, user: str, direct: bool, *words: str) -> str | None:
        """Runs virsh as `user`; returns None if it worked, else what it said."""
        done = as_user(user, self.uri(direct), *words)
        return None if done.returncode == 0 else done.stdout.strip()

    def state(self, *names: str) -> Any:
        """Returns all that a call could change: the target's state, and these domains."""
        asked = [f"domstate {n}; dumpxml {n}; dumpxml {n} --inactive" for n in names]
        return (
            [(v.path, v.uuid, v.size) for v in self.host.volumes.volumes()],
            {
                controller["ctrlr"]: [
                    (entry["scsi_dev_num"], entry["luns"][0]["bdev_name"])
                    for entry in controller["backend_specific"]["scsi"]
                ]
                for controller in self.host.client.call("vhost_get_controllers")
            },
            self.host.virsh_direct("; ".join(["list --all", *asked]), check=False),
        )


def as_user(user: str, uri: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs virsh as `user`; all that it says is in `stdout`."""
    return subprocess.run(
        [
            *("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"),
            *("--reset-env", "virsh", "-q", "-c", uri, *words),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def policed() -> Iterator[Policed]:
    if not is_root():
        pytest.fail("tests/libvirt need root: they run a libvirtd in a mount namespace")
    polkit_folder = scratch_directory("pk-")
    rights = repr({**RIGHTS, SHUT_OUT: "connect.search-domains domain.*"})
    with Polkit(polkit_folder, RULES.format(rights=rights)) as polkit:
        before = {key: os.environ.get(key) for key in polkit.environment}
        os.environ.update(polkit.environment)  # for libvirtd, and for the gateway's pkcheck
        try:
            with Host(keep=True) as host:
                yield from _policed(host)
        finally:
            for key, value in before.items():
                os.environ.pop(key)
                if value is not None:
                    os.environ[key] = value
    subprocess.run(["rm", "-rf", str(polkit_folder)], check=True)


def _policed(host: Host) -> Iterator[Policed]:
    conf = host.libvirtd.scratch / "etc/libvirtd.conf"
    keys = {line.split()[0] for line in LIBVIRTD_CONF.splitlines()}
    kept = [line for line in conf.read_text().splitlines() if line.split(" ")[0] not in keys]
    conf.write_text("\n".join(kept) + "\n" + LIBVIRTD_CONF)
    host.libvirtd.restart()
    host.stop_gateway()
    config = host.config.read_text().replace("[gateway]", '[gateway]\nsocket_mode = "0666"', 1)
    config += "create_missing_mib = 64\n"  # so that a start does something that can be seen
    host.config.write_text(config)
    host.start_gateway()
    for name in ("mine", "other"):
        image = host.scratch / f"{name}.img"
        image.write_bytes(b"\0" * MIB)
        image.chmod(0o666)
        own = (
            f"<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
            f"<source file='{image}'/><target dev='vda' bus='virtio'/></disk>"
        )
        host.volumes.create(f"lvs0/{name}", 8 * MIB)
        host.define(name, devices=own + ours(name, "sda"))
        host.virsh("start", name)
    yield Policed(host, host.gateway_socket)


def ours(volume: str, dev: str) -> str:
    """Returns a disk of ours."""
    return (
        f"<disk type='file' device='disk'><source file='/dev/virtlun/lvs0/{volume}'/>"
        f"<target dev='{dev}' bus='scsi'/></disk>"
    )


def same(policed: Policed, user: str, direct: list[str], through: list[str]) -> bool:
    """Does both, asserts that both work or both are denied; returns which, and undoes nothing.

    What libvirtd denies, the gateway denies in libvirtd's words and without any effect.
    """
    names = [word for word in through if re.fullmatch(r"(mine|other)(-ours)?", word)]
    libvirts = policed.do(user, True, *direct)
    before = None if libvirts is None else policed.state(*names)
    gateways = policed.do(user, False, *through)
    if libvirts is None:
        assert gateways is None, f"{user} may {direct} at libvirtd; the gateway says {gateways}"
        return True
    assert gateways is not None, f"{user} got {through} from the gateway; libvirtd says {libvirts}"
    assert re.search(DENIED, libvirts), libvirts
    assert re.search(DENIED, gateways), gateways
    assert policed.state(*names) == before, (
        f"{user} was denied {through}, and yet something changed"
    )
    return False


def may(user: str, *rights: str, name: str = "mine") -> bool:
    """What the table says."""
    granted = RIGHTS[user].split()
    for right in rights:
        all_of_it = right.split(".")[0] + ".*"
        wanted = {right, all_of_it}
        if name.startswith("mine"):
            wanted |= {f"{right}@mine", f"{all_of_it}@mine"}
        if not wanted & set(granted):
            return False
    return True


@by_day("mail", "list")
@pytest.mark.parametrize("user", others_at_night(RIGHTS))
def test_who_sees_what(policed: Policed, user: str) -> None:
    words = ["list", "--all", "--name"]
    assert same(policed, user, words, words) == bool(RIGHTS[user])
    for name in ("mine", "other"):
        for words in (["domblkstat", name], ["domblkinfo", name, "vda"], ["dumpxml", name]):
            seen = same(policed, user, words, words)
            assert seen == may(user, "domain.getattr", "domain.read", name=name)
        if RIGHTS[user]:
            for command in ("domblkinfo", "blkdeviotune"):
                read = policed.do(user, False, command, name, "sda")
                assert (read is None) == may(user, "domain.getattr", "domain.read", name=name)


def test_who_may_not_connect_gets_no_connection(policed: Policed) -> None:
    """libvirtd judges the opening of the connection itself: connect.getattr."""
    for words in (["domstate", "mine"], ["destroy", "mine"], ["list", "--all"]):
        assert not same(policed, SHUT_OUT, words, words)


@by_day("man")
@pytest.mark.parametrize("user", ["man", SHUT_OUT, "www-data"])
def test_whoever_is_denied_changes_nothing_by_another_driver(policed: Policed, user: str) -> None:
    """test:///default asks no polkit: whoever gets in has a domain of the victim's UUID there."""
    host, victim = policed.host, "other"
    uuid = host.virsh_direct("domuuid", victim)
    host.volumes.create("lvs0/foreign", 8 * MIB)
    files = {name: host.scratch / f"foreign-{name}.xml" for name in ("had", "more", "domain")}
    files["had"].write_text(ours(victim, "sda"))
    files["more"].write_text(ours("foreign", "sdb"))
    files["domain"].write_text(MADE_UP.format(uuid=uuid, devices=ours(victim, "sda")))
    for path in files.values():
        path.chmod(0o644)
    attack = [
        *(f"attach-device {uuid} {files['more']} {side}" for side in ("--live", "--config")),
        *(f"detach-device {uuid} {files['had']} {side}" for side in ("--live", "--config")),
        *(f"blockresize {uuid} {path} 64M" for path in ("sda", f"/dev/virtlun/lvs0/{victim}")),
    ]
    before = policed.state(victim)
    for command in attack:
        assert re.search(DENIED, policed.do(user, False, *command.split()) or ""), command
    beside = [f"define {files['domain']}", "start made-up", *attack, f"dominfo {uuid}"]
    uri = f"test+unix:///default?socket={policed.gateway}"
    said = as_user(user, uri, "; ".join([*beside, "destroy made-up", "undefine made-up"])).stdout
    if RIGHTS.get(user) == "":
        assert re.search(DENIED, said), said
    else:
        assert re.search(r"Name: +made-up", said) and re.search(r"State: +running", said), said
    assert policed.state(victim) == before
    host.volumes.delete("lvs0/foreign")


PLACES = [("mine", "--live"), ("mine", "--config"), ("other", "--live")]
"""Domains, and sides of them."""


@by_day("mail-mine---live", "mail-mine---config", "list-other---live")
@pytest.mark.parametrize(("name", "flag"), PLACES)
@pytest.mark.parametrize("user", others_at_night(CHANGING))
def test_who_attaches_and_detaches(policed: Policed, user: str, name: str, flag: str) -> None:
    host = policed.host
    image = host.scratch / "more.img"
    image.write_bytes(b"\0" * MIB)
    image.chmod(0o666)
    if not any(v.path == "lvs0/more" for v in host.volumes.volumes()):
        host.volumes.create("lvs0/more", 8 * MIB)
    theirs, mine = host.scratch / "theirs.xml", host.scratch / "ours.xml"
    theirs.write_text(
        f"<disk type='file' device='disk'><driver name='qemu' type='raw'/>"
        f"<source file='{image}'/><target dev='vdb' bus='virtio'/></disk>"
    )
    mine.write_text(ours("more", "sdb"))
    for path in (theirs, mine):
        path.chmod(0o644)
    needed = ["domain.getattr", "domain.write"] + (["domain.save"] if flag == "--config" else [])
    expected = may(user, *needed, name=name)
    side = ("--inactive",) if flag == "--config" else ()
    for verb in ("attach-device", "detach-device"):
        if verb == "detach-device" and not expected:  # something to try it on
            host.virsh_direct("attach-device", name, str(theirs), flag)
            host.virsh("attach-device", name, str(mine), flag)
        words = [[verb, name, str(path), flag] for path in (theirs, mine)]
        assert same(policed, user, *words) == expected
        there = (verb == "attach-device") == expected
        assert ("sdb" in host.virsh("domblklist", name, *side)) == there
    if not expected:
        host.virsh_direct("detach-device", name, str(theirs), flag)
        host.virsh("detach-device", name, str(mine), flag)


@by_day("uucp")
@pytest.mark.parametrize("user", ["uucp", "list"])
def test_who_restores(policed: Policed, user: str) -> None:
    """Whoever may start the domain, and write it, too (remote_protocol.x, DOMAIN_RESTORE)."""
    host, name = policed.host, "mine"
    image = host.scratch / "saved"
    host.virsh("save", name, str(image))
    try:
        words = ["restore", str(image)]
        if may(user, "domain.getattr", "domain.start", "domain.write"):
            assert policed.do(user, False, *words) is None
        else:
            assert not same(policed, user, words, words)
        there = [controller["ctrlr"] for controller in host.client.call("vhost_get_controllers")]
        running = name in host.virsh_direct("list", "--name").split()
        assert running == (user == "list")
        assert (f"vm-{host.virsh_direct('domuuid', name).strip()}" in there) == running
    finally:
        if name not in host.virsh_direct("list", "--name").split():
            host.virsh("restore", str(image))


@by_day("backup-mine", "list-mine")
@pytest.mark.parametrize("name", ["mine", "other"])
@pytest.mark.parametrize("user", ["backup", "mail", "list"])
def test_who_resizes(policed: Policed, user: str, name: str) -> None:
    size = policed.host.volumes.volume(f"lvs0/{name}").size
    larger = f"{size + 4 * MIB}B"
    did = same(
        policed,
        user,
        ["blockresize", name, "vda", f"{2 * MIB}B"],
        ["blockresize", name, "sda", larger],
    )
    assert did == may(user, "domain.getattr", "domain.block-write", name=name)
    assert policed.host.volumes.volume(f"lvs0/{name}").size == size + (4 * MIB if did else 0)


@by_day("man-mine---live", "proxy-mine---config", "list-other---live")
@pytest.mark.parametrize(("name", "flag"), PLACES)
@pytest.mark.parametrize("user", ["man", "proxy", "list"])
def test_who_limits(policed: Policed, user: str, name: str, flag: str) -> None:
    iops = str(1000 + PLACES.index((name, flag)))
    words = [["blkdeviotune", name, dev, "--total-iops-sec", iops, flag] for dev in ("vda", "sda")]
    needed = ["domain.getattr", "domain.write"] + (["domain.save"] if flag == "--config" else [])
    did = same(policed, user, *words)
    assert did == may(user, *needed, name=name)
    assert (iops in policed.host.virsh("blkdeviotune", name, "sda", flag)) == did
    policed.host.virsh("blkdeviotune", name, "sda", "--total-iops-sec", "0", flag)


@by_day("backup-mine", "list-mine")
@pytest.mark.parametrize("name", ["mine", "other"])
@pytest.mark.parametrize("user", ["backup", "list"])
def test_who_commits(policed: Policed, user: str, name: str) -> None:
    """virsh itself reads the domain for `blockjob`, so whoever may only write is denied there."""
    host = policed.host
    may_write = may(user, "domain.getattr", "domain.block-write", name=name)
    may_pivot = may_write and may(user, "domain.read", name=name)
    (snapshot,) = host.volumes.snapshot([f"lvs0/{name}"], "s")
    commit = ("blockcommit", name, "sda", "--active")
    said = policed.do(user, False, *commit)
    denied = re.compile("access denied|failed to get domain")
    if not may_write:
        assert denied.search(str(said))
        host.virsh(*commit)
    else:
        assert said is None
    for direct, dev in ((True, "vda"), (False, "sda")):
        said = policed.do(user, direct, "blockjob", name, dev, "--pivot")
        assert bool(denied.search(str(said))) != may_pivot
    there = [volume.uuid for volume in host.volumes.volumes("lvs0") if volume.snapshot]
    assert there == ([] if may_pivot else [snapshot.uuid])
    if not may_pivot:
        host.virsh("blockjob", name, "sda", "--pivot")


@by_day("backup-mine", "list-mine")
@pytest.mark.parametrize("name", ["mine", "other"])
@pytest.mark.parametrize("user", ["backup", "list"])
def test_who_copies(policed: Policed, user: str, name: str) -> None:
    """Where libvirtd says no there is no copy, nor a volume for one; also for `blockjob`."""
    host, to = policed.host, f"lvs0/copy-{name}-{user}"
    expected = may(user, "domain.getattr", "domain.block-write", name=name)
    how = ["--transient-job", "--dest"]
    did = same(
        policed,
        user,
        ["blockcopy", name, "vda", *how, f"{host.scratch}/{name}-{user}.copy"],
        ["blockcopy", name, "sda", *how, f"/dev/virtlun/{to}"],
    )
    assert did == expected
    made = [volume.uuid for volume in host.volumes.volumes("lvs0") if volume.path == to]
    assert len(made) == len(host.client.call("virtlun_lun_copy_check")) == int(expected)
    may_limit = expected and may(user, "domain.read", name=name)
    for dev in ("vda", "sda"):
        said = policed.do(user, dev == "vda", "blockjob", name, dev, "--bandwidth", "9")
        assert (said is None) == may_limit
        host.virsh("blockjob", name, dev, "--abort", check=False)
    for uuid in made:
        host.volumes.delete(uuid)


@by_day("man-mine", "lp-other")
@pytest.mark.parametrize("name", ["mine", "other"])
@pytest.mark.parametrize("user", others_at_night(["man", "mail", "lp", "list"], ("man", "lp")))
def test_who_takes_reverts_to_and_deletes_snapshots(policed: Policed, user: str, name: str) -> None:
    """libvirtd judges, and where it says no there is no lvol snapshot, and nothing is paused."""
    expected = may(user, "domain.getattr", "domain.snapshot", name=name)
    left = ["--disk-only", "--diskspec"]
    take = ["snapshot-create-as", name]
    did = same(
        policed,
        user,
        [*take, "d", *left, f"vda,file={policed.host.scratch}/{name}-{user}.d"],
        [*take, "g", *left, "vda,snapshot=no"],
    )
    assert did == expected
    host = policed.host
    snapshots = {v.name for v in host.volumes.volumes("lvs0") if v.snapshot}
    assert snapshots == ({f"{name}@g"} if expected else set())
    if not expected:
        host.virsh(*take, "g", *left, "vda,snapshot=no")
    assert (policed.do(user, False, "snapshot-revert", name, "g", "--running") is None) == expected
    assert host.virsh("domstate", name) == "running"
    assert (policed.do(user, False, "snapshot-delete", name, "g") is None) == expected
    if not expected:
        host.virsh("snapshot-delete", name, "g")
    else:
        host.virsh_direct("snapshot-delete", name, "d", "--metadata")
    assert not [v for v in host.volumes.volumes("lvs0") if v.snapshot]


@by_day("man-mine", "list-mine")
@pytest.mark.parametrize(
    ("user", "name"),
    [
        ("man", "mine"),
        pytest.param("mail", "mine", marks=pytest.mark.nightly),
        ("lp", "mine"),
        pytest.param("lp", "other", marks=pytest.mark.nightly),
        ("list", "mine"),
    ],
)
def test_who_takes_checkpoints_and_makes_backups(policed: Policed, user: str, name: str) -> None:
    """libvirtd judges, and where it says no there is no lvol snapshot, file or program."""
    host = policed.host
    may_take = may(user, "domain.getattr", "domain.checkpoint", name=name)
    take = ["checkpoint-create-as", name, "c", "--diskspec", "sda"]
    assert (policed.do(user, False, *take) is None) == may_take
    snapshots = {v.name for v in host.volumes.volumes("lvs0") if v.snapshot}
    assert snapshots == ({f"{name}@checkpoint-c"} if may_take else set())
    if not may_take:
        host.virsh(*take)
    may_read = may(user, "domain.getattr", "domain.read", name=name)
    assert (policed.do(user, False, "checkpoint-dumpxml", name, "c") is None) == may_read
    begin = ["backup-begin", name, str(host.scratch / "backup.xml")]
    folder = host.scratch / "nbd"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)  # for QEMU's user
    server = f"<server transport='unix' socket='{folder}/{name}'/>"
    disks = "<disks><disk name='sda'/></disks>"
    Path(begin[2]).write_text(f"<domainbackup mode='pull'>{server}{disks}</domainbackup>")
    may_copy = may(user, "domain.getattr", "domain.checkpoint", "domain.block-write", name=name)
    assert (policed.do(user, False, *begin) is None) == may_copy
    assert bool(host.client.call("virtlun_export_list")) == may_copy
    if not may_copy:
        host.virsh(*begin)
    assert (policed.do(user, False, "domjobinfo", name) is None) == may_read
    may_write = may(user, "domain.getattr", "domain.write", name=name)
    assert (policed.do(user, False, "domjobabort", name) is None) == may_write
    if not may_write:
        host.virsh("domjobabort", name)
    assert (policed.do(user, False, "checkpoint-delete", name, "c") is None) == may_take
    if not may_take:
        host.virsh("checkpoint-delete", name, "c")
    assert not [v for v in host.volumes.volumes("lvs0") if v.snapshot]
    assert host.client.call("virtlun_export_list") == []


@by_day("mail-mine", "list-other")
@pytest.mark.parametrize(
    ("user", "name"),
    [
        *(
            pytest.param(user, "mine", marks=[] if user in BY_DAY else [pytest.mark.nightly])
            for user in RIGHTS
            if user != "www-data"
        ),
        ("list", "other"),
    ],
)
def test_who_defines_creates_and_starts(policed: Policed, user: str, name: str) -> None:
    host = policed.host
    plain, with_ours = f"{name}-plain", f"{name}-ours"
    for domain, devices in ((plain, ""), (with_ours, ours(f"new-{user}-{name}", "sda"))):
        path = host.scratch / f"{domain}.xml"
        path.write_text(domain_xml(domain, host.image, host.scratch, devices=devices))
        path.chmod(0o644)
    files = [str(host.scratch / f"{domain}.xml") for domain in (plain, with_ours)]

    def clean() -> None:
        for domain in (plain, with_ours):
            host.virsh("destroy", domain, check=False)
            host.virsh("undefine", domain, check=False)

    try:
        did = same(policed, user, ["create", files[0]], ["create", files[1]])
        assert did == may(user, "domain.getattr", "domain.write", "domain.start", name=name)
        assert _has_volume(host, f"new-{user}-{name}") == did
        clean()

        did = same(policed, user, ["define", files[0]], ["define", files[1]])
        assert did == may(user, "domain.getattr", "domain.write", "domain.save", name=name)
        clean()

        host.virsh_direct("define", files[0])
        host.virsh("define", files[1])
        did = same(policed, user, ["start", plain], ["start", with_ours])
        assert did == may(user, "domain.getattr", "domain.start", name=name)
        uuid = host.virsh("domuuid", with_ours)
        controllers = [c["ctrlr"] for c in host.client.call("vhost_get_controllers")]
        assert (f"vm-{uuid}" in controllers) == did
        assert _has_volume(host, f"new-{user}-{name}") == did
        if did:
            recorded = host.volumes.volume(f"lvs0/new-{user}-{name}").uuid
            assert recorded in host.virsh_direct("dumpxml", with_ours, "--inactive")
    finally:
        clean()
        if _has_volume(host, f"new-{user}-{name}"):
            host.volumes.delete(f"lvs0/new-{user}-{name}")


def _has_volume(host: Host, name: str) -> bool:
    return any(v.path == f"lvs0/{name}" for v in host.volumes.volumes())


def test_without_polkit_the_gateway_refuses_as_libvirtd_does(policed: Policed) -> None:
    """A gateway whose polkit does not answer: nothing is made, and nobody but root gets in."""
    host = policed.host
    config = host.scratch / "deaf.toml"
    config.write_text(
        host.config.read_text().replace("[gateway]", '[gateway]\npkcheck = "/bin/false"', 1)
    )
    host.define("mine-deaf", devices=ours("deaf", "sda"))
    with GatewayProcess(config, host.scratch / "deaf", host.scratch / "deaf.log") as gateway:
        said = Policed(host, gateway.socket).do("list", False, "start", "mine-deaf")
        assert said is not None
        assert "authentication failed" in said
    assert not _has_volume(host, "deaf")
    assert host.virsh("domstate", "mine-deaf") == "shut off"
    host.virsh("undefine", "mine-deaf")
