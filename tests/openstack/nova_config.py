"""The configuration of a whole Nova on one host or several, and its cells.

What a compute host needs of us is examples/openstack/nova.conf, as it is there. There is no
Keystone: who calls says so in a token USER:PROJECT, also Nova itself where it calls Cinder or
placement.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.openstack.cinder_process import PROJECT
from tests.openstack.nova_process import python
from tests.support.cache import ROOT
from tests.support.examples import used

TOKEN = f"admin:{PROJECT}"
WITH_KEYSTONE, WITHOUT = "osprofiler authtoken keystonecontext", "osprofiler keystonecontext"
HELPER = "from oslo_privsep.daemon import helper_main; helper_main()"
NOVA = """
[DEFAULT]
host = {host}
my_ip = 127.0.0.1
state_path = {folder}/{host}
instances_path = {folder}/instances
transport_url = {bus}
compute_driver = libvirt.LibvirtDriver
use_stderr = true
reserved_host_memory_mb = 0
allow_resize_to_same_host = true
# The test guest does not heed the power button.
shutdown_timeout = 2
volume_usage_poll_interval = 5

[libvirt]
# Times 20 seconds, for a guest that does not let go of a disk.
device_detach_attempts = 3

[oslo_messaging_notifications]
driver = log

[api_database]
connection = {api}

[database]
connection = {cell1}

[wsgi]
api_paste_config = {folder}/api-paste.ini

[oslo_concurrency]
lock_path = {folder}/{host}

[conductor]
workers = 1

[scheduler]
workers = 1
discover_hosts_in_cells_interval = 2

[placement]
auth_type = admin_token
endpoint = {placement}
token = {token}

[cinder]
auth_type = admin_token
endpoint = {cinder}
token = {token}
endpoint_template = {cinder}

[neutron]
auth_type = admin_token
endpoint = {others}
token = {token}
endpoint_override = {others}

[glance]
endpoint_override = {glance}

[vnc]
enabled = false

[serial_console]
enabled = true
proxyclient_address = 127.0.0.1

[nova_sys_admin]
helper_command = {helper}

[privsep_osbrick]
helper_command = {helper}
"""
PLACEMENT = """
[DEFAULT]
use_stderr = true

[api]
auth_strategy = noauth2

[placement_database]
connection = {database}
sync_on_startup = true
"""


@dataclass(frozen=True)
class Peers:
    """URLs of what Nova talks to."""

    bus: str
    api_database: str
    cell_database: str
    placement: str
    cinder: str
    glance: str
    others: str


def configure(folder: Path, peers: Peers, hosts: Mapping[str, Path]) -> dict[str, Path]:
    """Writes Nova's configurations into `folder`; returns the path of each host's.

    `hosts` are the UNIX sockets of their libvirts. What Nova keeps of servers is in one folder for
    all, as on NFS.
    """
    pipelines = (python().parents[1] / "etc/nova/api-paste.ini").read_text()
    assert WITH_KEYSTONE in pipelines
    (folder / "api-paste.ini").write_text(pipelines.replace(WITH_KEYSTONE, WITHOUT))
    (folder / "instances").mkdir()
    return {host: _configure_host(folder, peers, host, socket) for host, socket in hosts.items()}


def _configure_host(folder: Path, peers: Peers, host: str, libvirt: Path) -> Path:
    path = folder / f"{host}.conf"
    (folder / host).mkdir()
    ours = used(ROOT / "examples/openstack/nova.conf").read_text()
    for word, its in (
        ("/run/virtlun/libvirt-sock", str(libvirt)),
        ("virt_type = kvm", "virt_type = qemu"),  # there is no KVM where tests run
    ):
        assert word in ours
        ours = ours.replace(word, its)
    more = NOVA.format(
        folder=folder,
        host=host,
        token=TOKEN,
        helper=f'{python()} -P -c "{HELPER}" --config-file {path}',
        api=peers.api_database,
        cell1=peers.cell_database,
        bus=peers.bus,
        placement=peers.placement,
        cinder=peers.cinder,
        glance=peers.glance,
        others=peers.others,
    )
    path.write_text(ours + more)
    return path


def configure_placement(folder: Path, database: str) -> None:
    """Writes placement's configuration into `folder`; `database` is the URL of its own."""
    (folder / "placement.conf").write_text(PLACEMENT.format(database=database))


def make_cells(config: Path, cell0: str) -> None:
    """Has Nova fill its databases, as its guide has it; `cell0` is the URL of that cell's."""
    for words in (
        ("api_db", "sync"),
        ("cell_v2", "map_cell0", "--database_connection", cell0),
        ("db", "sync"),
        ("cell_v2", "create_cell", "--name", "cell1"),
    ):
        subprocess.run(command("manage", config, *words), check=True, capture_output=True)


def command(program: str, config: Path, *words: str) -> list[str]:
    """Returns the command line of nova-`program`."""
    run = f"from nova.cmd.{program} import main; main()"
    return [str(python()), "-P", "-c", run, "--config-file", str(config), *words]
