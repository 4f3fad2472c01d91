"""`virtlun key`: keys of encrypted lvstores and bdevs, which the target has in memory only."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from plugin.cli.output import client, errors_as_sentences, json_option, show, text
from pydataplane.errors import VolumeError

COLUMNS = [
    ("NAME", "name", text),
    ("CIPHER", "cipher", text),
    ("BITS", "bits", text),
    ("USED BY", "used_by", lambda names: ", ".join(names) or "-"),
]

BYTES = (32, 64)
"""Lengths of a key: both halves of AES-128-XTS and of AES-256-XTS."""

MOST_BYTES = 4096
"""What is read of a file of a key."""


@click.group()
def key() -> None:
    """Keys of what lies encrypted.

    The target has them in memory only: after it was restarted, or the host, give them again.
    """


@key.command("list", short_help="List the keys that the target has.")
@json_option
@click.pass_obj
@errors_as_sentences
def list_(socket: Path, as_json: bool) -> None:
    """List the keys that the target has; it tells nobody the keys themselves."""
    show(
        [{**each} for each in client(socket).call("accel_crypto_keys_get")],
        COLUMNS,
        as_json=as_json,
        empty="no keys: give one with `virtlun key create NAME --file FILE`",
    )


@key.command(short_help="Give the target a key, also for what waits for it.")
@click.argument("name")
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, allow_dash=True),
    required=True,
    help="File with the key, 64 random bytes or as many in hexadecimal; - is standard input.",
)
@click.option(
    "--destroy-with-last", is_flag=True, help="Destroy it with the last bdev that uses it."
)
@click.pass_obj
@errors_as_sentences
def create(socket: Path, name: str, file: Path, destroy_with_last: bool) -> None:
    """Give the target the key NAME. Lvstores and bdevs that wait for it come back.

    Another key than theirs is refused. Keep the file, apart from the disks: without it nobody can
    read them. `head -c 64 /dev/urandom` makes a key of AES-256; one of AES-128 has 32 bytes.
    """
    if file == Path("-"):
        given = sys.stdin.buffer.read(MOST_BYTES)
    else:
        with file.open("rb") as opened:
            given = opened.read(MOST_BYTES)
    secret = _hexadecimal(given, file)
    half = len(secret) // 2
    client(socket).call(
        "accel_crypto_key_create",
        cipher="AES_XTS",
        key=secret[:half],
        key2=secret[half:],
        name=name,
        destroy_with_last=True if destroy_with_last else None,
    )
    click.echo(f"the target has the key {name}")


def _hexadecimal(given: bytes, file: Path) -> str:
    """Returns a key in hexadecimal, of its bytes or of such text; VolumeError if it is none."""
    try:
        written = given.decode("ascii").strip()
        of_text = bytes.fromhex(written)
    except ValueError:
        of_text = b""
    for key_bytes in (of_text, given):
        if len(key_bytes) in BYTES:
            return key_bytes.hex()
    raise VolumeError(
        f"{file} holds no key: a key has {BYTES[1]} bytes, or {2 * BYTES[1]} hexadecimal digits "
        "(half of that for AES-128)"
    )


@key.command()
@click.argument("name")
@click.pass_obj
@errors_as_sentences
def destroy(socket: Path, name: str) -> None:
    """Have the target forget the key NAME; one that is in use is refused."""
    client(socket).call("accel_crypto_key_destroy", key_name=name)
    click.echo(f"the target has forgotten the key {name}")
