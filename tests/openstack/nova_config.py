"""The configuration of a whole Nova on one host, and its cells.

What a compute host needs of us is examples/openstack/nova.conf, as it is there. There is no
Keystone: who calls says so in a token USER:PROJECT, also Nova itself where it calls Cinder or
placement.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.openstack.cinder_process import HOST, PROJECT
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
state_path = {folder}
transport_url = {bus}
compute_driver = libvirt.LibvirtDriver
use_stderr = true
reserved_host_memory_mb = 0
allow_resize_to_same_host = true

[api_database]
connection = {api}

[database]
connection = {cell1}

[wsgi]
api_paste_config = {folder}/api-paste.ini

[oslo_concurrency]
lock_path = {folder}

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
endpoint_override = {others}

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
    """URLs of what Nova talks to, and the UNIX socket of its libvirt."""

    bus: str
    api_database: str
    cell_database: str
    placement: str
    cinder: str
    others: str
    libvirt: Path


def configure(folder: Path, peers: Peers) -> Path:
    """Writes Nova's configuration into `folder`; returns its path."""
    path = folder / "nova.conf"
    ours = used(ROOT / "examples/openstack/nova.conf").read_text()
    for word, its in (
        ("/run/virtlun/libvirt-sock", str(peers.libvirt)),
        ("virt_type = kvm", "virt_type = qemu"),  # there is no KVM where tests run
    ):
        assert word in ours
        ours = ours.replace(word, its)
    more = NOVA.format(
        folder=folder,
        host=HOST,
        token=TOKEN,
        helper=f'{python()} -P -c "{HELPER}" --config-file {path}',
        api=peers.api_database,
        cell1=peers.cell_database,
        bus=peers.bus,
        placement=peers.placement,
        cinder=peers.cinder,
        others=peers.others,
    )
    path.write_text(ours + more)
    pipelines = (python().parents[1] / "etc/nova/api-paste.ini").read_text()
    assert WITH_KEYSTONE in pipelines
    (folder / "api-paste.ini").write_text(pipelines.replace(WITH_KEYSTONE, WITHOUT))
    (folder / "instances").mkdir()
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
