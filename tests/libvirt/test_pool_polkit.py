"""A real polkitd decides about pools and volumes: of ours everybody gets what libvirtd would grant.

Each user does the same to a `dir` pool at libvirtd itself and to one of ours through the gateway.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.libvirt.test_polkit import LIBVIRTD_CONF, Policed
from tests.libvirt.test_pools import OURS, THEIRS
from tests.support.host import Host, scratch_directory
from tests.support.polkit import Polkit

pytestmark = [pytest.mark.root, pytest.mark.vm, pytest.mark.nightly]

SEES = "connect.* storage-pool.getattr storage-pool.read storage-pool.search-storage-vols"
RIGHTS: dict[str, str] = {
    "man": f"{SEES} storage-vol.getattr storage-vol.read storage-vol.data-read",
    "mail": "connect.* storage-pool.* storage-vol.*",
    "list": f"{SEES} storage-vol.*@mine",
    "lp": f"{SEES} storage-pool.start storage-pool.stop storage-pool.refresh",
    "www-data": "connect.*",
}
"""Debian's own users to what they may do; `@mine`: to volumes whose name begins so."""

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
        return polkit.Result.YES;
    var mine = String(action.lookup("vol_name")).indexOf("mine") == 0;
    var found = granted.split(" ").some(function(right) {{
        var parts = right.split("@");
        if (parts.length > 1 && !mine)
            return false;
        return parts[0] == id || parts[0] == id.split(".")[0] + ".*";
    }});
    return found ? polkit.Result.YES : polkit.Result.NO;
}});
"""

CALLS = (
    "pool-info {pool}",
    "pool-dumpxml {pool}",
    "pool-refresh {pool}",
    "vol-list {pool}",
    *(
        call.replace("NAME", name)
        for name in ("mine", "other")
        for call in (
            "vol-info NAME --pool {pool}",
            "vol-dumpxml NAME --pool {pool}",
            "vol-path NAME --pool {pool}",
            "vol-create-as {pool} NAME-new 1M",
            "vol-clone NAME NAME-copy --pool {pool}",
            "vol-resize NAME 16M --pool {pool}",
            "vol-upload NAME {up} --pool {pool}",
            "vol-download NAME {down} --pool {pool}",
            "vol-wipe NAME --pool {pool}",
            "vol-delete NAME --pool {pool}",
        )
    ),
    "pool-autostart {pool}",
    "pool-destroy {pool}",
    "pool-start {pool}",
)


SEEN = "pool-info|pool-dumpxml|vol-list"
DONE = {
    "man": re.compile(f"{SEEN}|vol-(info|dumpxml|path|download)"),
    "mail": re.compile(""),
    "list": re.compile(f"{SEEN}|mine"),
    "lp": re.compile(f"{SEEN}|pool-(refresh|destroy|start)"),
    "www-data": re.compile("nothing"),
}
"""Which of the calls their rights are enough for."""


@pytest.fixture(scope="module")
def policed() -> Iterator[Policed]:
    """A host with both pools."""
    folder = scratch_directory("pk-")
    with (
        Polkit(folder, RULES.format(rights=repr(RIGHTS))) as polkit,
        pytest.MonkeyPatch.context() as set_to,
    ):
        for key, value in polkit.environment.items():
            set_to.setenv(key, value)  # for libvirtd, and for the gateway's pkcheck
        with Host(keep=True) as host:
            conf = host.libvirtd.scratch / "etc/libvirtd.conf"
            keys = {line.split()[0] for line in LIBVIRTD_CONF.splitlines()}
            kept = [n for n in conf.read_text().splitlines() if n.split(" ")[0] not in keys]
            conf.write_text("\n".join(kept) + "\n" + LIBVIRTD_CONF)
            host.libvirtd.restart()
            host.stop_gateway()
            config = host.config.read_text()
            host.config.write_text(
                config.replace("[gateway]", '[gateway]\nsocket_mode = "0666"', 1)
            )
            host.start_gateway()
            (host.scratch / "theirs").mkdir()
            host.virsh("pool-define-as", THEIRS, "dir", "--target", str(host.scratch / "theirs"))
            host.virsh("pool-start", THEIRS)
            yield Policed(host, host.gateway_socket)
            host.virsh("pool-destroy", THEIRS)
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def outcome(said: str | None) -> str:
    """Returns in a word what became of a call."""
    if said is None:
        return "done"
    return "denied" if "access denied" in said else said


@pytest.mark.parametrize("user", RIGHTS)
def test_who_may_do_what_to_pools_and_volumes(policed: Policed, user: str) -> None:
    host = policed.host
    up, down = host.scratch / "up", host.scratch / f"down-{user}"
    up.write_bytes(b"u" * 4096)
    down.touch()
    for path in (up, down):
        path.chmod(0o666)
    for pool in (THEIRS, OURS):
        for name in host.virsh("vol-list", pool).split()[::2]:
            host.virsh("vol-delete", name, "--pool", pool)
        for name in ("mine", "other"):
            host.virsh("vol-create-as", pool, name, "8M", "--allocation", "0")
    results = {}
    for call in CALLS:
        at_libvirtd, of_ours = (
            outcome(policed.do(user, direct, *call.format(pool=pool, up=up, down=down).split()))
            for direct, pool in ((True, THEIRS), (False, OURS))
        )
        results[call] = (at_libvirtd, of_ours)
    differing = {call: both for call, both in results.items() if len(set(both)) > 1}
    assert not differing
    done = {call for call, (_, of_ours) in results.items() if of_ours == "done"}
    assert done == {call for call in CALLS if DONE[user].search(call)}
