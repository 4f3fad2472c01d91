"""The command's root: options shared by all nouns."""

from __future__ import annotations

import re
from pathlib import Path

import click

from plugin.cli import (
    bdev,
    completion,
    doctor,
    domain,
    hostmove,
    image,
    io_errors,
    key,
    limits,
    lvstore,
    metrics,
    move,
    pool,
    report,
    stream,
    target,
    top,
    volume,
)
from plugin.cli.output import ADDRESS_KEY, CONFIG_KEY
from plugin.config import DEFAULT_PATH, TARGET_NAME
from plugin.targets import chosen
from pydataplane.domain.errors import ConfigError


def _check_name(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    """Refuses what cannot be the name of a target, which is that of a folder."""
    if name is not None and not re.fullmatch(TARGET_NAME, name):
        raise click.BadParameter(
            "a target's name has small letters, digits and hyphens, 23 at most"
        )
    return name


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar="VIRTLUN_CONFIG",
    show_envvar=True,
    help=f"Configuration file.  [default: {DEFAULT_PATH}, if it exists]",
)
@click.option(
    "--socket",
    type=click.Path(readable=False, path_type=Path),  # the target's answer tells more
    envvar="VIRTLUN_TARGET_SOCKET",
    show_envvar=True,
    help="The target's RPC socket.  [default: the configuration's rpc_socket]",
)
@click.option(
    "--target",
    "target_name",
    metavar="NAME",
    envvar="VIRTLUN_TARGET_NAME",
    show_envvar=True,
    callback=_check_name,
    help="Of several targets on this host the one of that name: see `virtlun target list`.",
)
@click.version_option(package_name="virtlun")
@click.pass_context
def main(
    context: click.Context,
    config_path: Path | None,
    socket: Path | None,
    target_name: str | None,
) -> None:
    """Fast shared user-space storage for the VMs of this host.

    A first session:

    \b
      virtlun doctor
      virtlun target start
      virtlun lvstore create lvs0 --file /var/lib/virtlun/lvs0.img --size 100G
      virtlun volume create lvs0/data 10G
      virsh -c 'qemu+unix:///system?socket=/run/virtlun/libvirt-sock' \\
          attach-disk VM /dev/virtlun/lvs0/data sdb --live --config
    """  # noqa: D301 (click's mark)
    try:
        config, address, context.obj = chosen(config_path, socket, target_name)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    context.meta[CONFIG_KEY] = config
    context.meta[ADDRESS_KEY] = address


for command in (
    bdev.bdev,
    completion.completion,
    doctor.doctor,
    domain.domain,
    key.key,
    lvstore.lvstore,
    metrics.metrics,
    pool.pool,
    report.report,
    target.target,
    top.top,
    volume.volume,
):
    main.add_command(command)

for command in (io_errors.errors, io_errors.retry):
    domain.domain.add_command(command)
for command in (
    image.import_,
    image.export,
    image.diff,
    limits.limits,
    move.move,
    hostmove.incoming,
    stream.send,
    stream.receive,
):
    volume.volume.add_command(command)


if __name__ == "__main__":
    main()
