"""The command's root: options shared by all nouns."""

from __future__ import annotations

from pathlib import Path

import click

from plugin.cli import doctor, domain, lvstore, target, top, volume
from pydataplane.client import DEFAULT_SOCKET


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    default=DEFAULT_SOCKET,
    show_default=True,
    envvar="VIRTLUN_TARGET_SOCKET",
    help="The target's RPC socket.",
)
@click.version_option(package_name="virtlun")
@click.pass_context
def main(context: click.Context, socket: Path) -> None:
    """Fast shared user-space storage for the VMs of this host.

    A first session:

    \b
      virtlun doctor
      virtlun target start
      virtlun lvstore create lvs0 --file /var/lib/virtlun/lvs0.img --size 100G
      virtlun volume create lvs0/data 10G
      virsh -c 'qemu+unix:///system?socket=/run/virtlun/libvirt-sock' \\
          attach-disk VM /dev/virtlun/lvs0/data sdb
    """  # noqa: D301 (click's mark)
    context.obj = socket


for command in (
    doctor.doctor,
    domain.domain,
    lvstore.lvstore,
    target.target,
    top.top,
    volume.volume,
):
    main.add_command(command)


if __name__ == "__main__":
    main()
