"""Moves to another host: what the two sides say to each other, and what is refused before."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from plugin.cli import main
from plugin.hostmoves import destination, domainxml, wire
from plugin.hostmoves.remote import Remote
from plugin.hostmoves.wire import CHUNK_MAX, ChunkReader, ChunkWriter, Input, say
from plugin.volumelocks import locked
from pydataplane.domain.model import Settings
from pydataplane.errors import VolumeError


@contextmanager
def heard(data: bytes, idle_s: float | None = None, *, ends: bool = True) -> Iterator[Input]:
    """Yields what reads `data` from a pipe, which its writer has closed if it `ends`."""
    read, write = os.pipe()
    try:
        os.write(write, data)
        if ends:
            os.close(write)
        yield Input(read, idle_s)
    finally:
        os.close(read)
        if not ends:
            os.close(write)


def stream(*pieces: bytes) -> bytes:
    out = io.BytesIO()
    writer = ChunkWriter(out)
    for piece in pieces:
        writer.write(piece)
    writer.end()
    assert writer.count == sum(map(len, pieces))
    return out.getvalue()


def all_of(reader: ChunkReader, at_once: int = 1000) -> bytes:
    found = b""
    while some := reader.read(at_once):
        found += some
    return found


@given(st.lists(st.binary(max_size=3000), max_size=8), st.integers(1, 5000))
def test_a_stream_comes_as_it_was_and_a_request_follows(pieces: list[bytes], at_once: int) -> None:
    out = io.BytesIO()
    say(out, {"do": "receive"})
    out.write(stream(*pieces))
    say(out, {"do": "clean"})
    with heard(out.getvalue()) as found:
        assert found.message() == {"do": "receive"}
        assert all_of(ChunkReader(found), at_once) == b"".join(pieces)
        assert found.message() == {"do": "clean"}
        assert found.message() is None


def test_long_pieces_are_cut_and_what_says_that_it_is_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.BytesIO()
    writer = ChunkWriter(out)
    monkeypatch.setattr(wire, "PING_S", -1.0)
    writer.still_there()
    writer.write(b"x" * (2 * CHUNK_MAX + 1))
    writer.still_there()
    writer.end()
    assert out.getvalue().count(wire.STILL_THERE.to_bytes(4, "little")) == 2
    out.seek(0)
    reader = ChunkReader(out)  # type: ignore[arg-type] # it reads alike
    assert all_of(reader, 1 << 16) == b"x" * (2 * CHUNK_MAX + 1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (stream(b"abc")[:-1], "ended before the stream did"),
        (stream(b"abc")[:6], "ended before the stream did"),
        (stream(b"abc")[:-1] + b"x", "was changed on its way"),
        (stream(b"abc").replace(b"abc", b"abd"), "was changed on its way"),
        (b"\xfe\xff\xff\xff" + bytes(40), "a chunk of 4294967294 bytes"),
        (b"", "ended before the stream did"),
    ],
)
def test_a_stream_that_is_not_whole_is_none(data: bytes, why: str) -> None:
    with heard(data) as found, pytest.raises(VolumeError, match=why):
        all_of(ChunkReader(found))


@pytest.mark.parametrize(
    "line", [b"Welcome!\n", b"[1]\n", b"\xff\xfe\n", b'{"do":', b"[" * 60000 + b"\n"]
)
def test_what_is_no_answer_is_told(line: bytes) -> None:
    with heard(line) as found, pytest.raises(VolumeError, match="what came is no answer: '"):
        found.message()


def test_a_line_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "LINE_MAX", 100)
    monkeypatch.setattr(wire, "READ_BYTES", 64)
    with heard(b"{" * 1000) as found, pytest.raises(VolumeError, match="no answer"):
        found.message()


def test_one_that_says_nothing_is_given_up() -> None:
    with (
        heard(b"", idle_s=0.01, ends=False) as found,
        pytest.raises(VolumeError, match="nothing came for"),
    ):
        found.message()


@pytest.mark.parametrize("held", ["incoming v-uuid", "v-uuid"])
def test_one_command_at_a_time_works_with_what_comes(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one that it comes by, and one by which it goes on to a third host."""
    monkeypatch.setattr(destination, "LOCK_S", 0.0)
    volumes = cast(Any, SimpleNamespace(client=SimpleNamespace(path=tmp_path / "rpc.sock")))
    with heard(b'{"do": "ping", "of": "v-uuid"}\n' * 2) as requests:
        answers = io.BytesIO()
        there = destination.Destination(volumes, volumes, lambda: None, requests, answers)
        with locked(tmp_path, (held, "")), pytest.raises(VolumeError, match="by another command"):
            there.serve()
        there.serve()
    assert answers.getvalue().endswith(b"}\n{}\n")


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=x", "root@-x", "", "a b", "a;b", "$(x)", "a\nb", "a'b", "@a", "é"]
)
def test_what_is_no_name_of_a_host_is_refused(host: str) -> None:
    with pytest.raises(VolumeError, match="names no host"):
        Remote(host, ["ssh"], ["virtlun"])


@pytest.mark.parametrize("host", ["b", "root@b.example", "10.0.0.1", "u_1@[fe80::1%eth0]"])
def test_a_host_is_one_word_after_the_options(host: str) -> None:
    remote = Remote(host, ["ssh", "-p", "2222"], ["sudo", "virtlun", "--target", "a b"])
    wanted = "sudo virtlun --target 'a b' volume incoming"
    assert remote._command == ["ssh", "-p", "2222", "--", host, wanted]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["lvs1", "--keep"], "--keep is of a move to another host"),
        (["--with-vm"], "--with-vm is of a move to another host"),
        ([], "where is it to go?"),
        (["lvs1", "--host", "b", "--to", "lvs2"], "say once"),
        (["--host", "b", "--abort", "--keep"], "--abort goes with no option"),
        (["--host", "b", "--ssh", "ssh '"], "No closing quotation"),
        (["--host", "b", "--remote", " "], "name a program"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], why: str) -> None:
    result = CliRunner().invoke(main, ["volume", "move", "lvs0/v", *words])
    assert result.exit_code == 2 and why in result.stderr, result.output


XML = """<domain type='qemu'><name>web</name><os><type arch='x86_64' machine='q35'>hvm</type>
<loader>/usr/share/OVMF.fd</loader>{os}</os><devices><emulator>/usr/bin/qemu</emulator>
<disk type='file'><source file='/dev/virtlun/lvs0/root'/><target dev='sda' bus='scsi'/></disk>
<disk type='volume'><source pool='virtlun-lvs0' volume='data'/><target dev='sdb'/></disk>
<disk type='file' device='cdrom'><target dev='sdc' bus='sata'/></disk>
<disk type='block'><source dev='/dev/sdz'/><target dev='vda'/></disk>{devices}
</devices></domain>"""


def test_what_a_domain_needs_of_its_host() -> None:
    found = domainxml.needs(XML.format(os="", devices=""), Settings())
    assert found.volumes == ["lvs0/root", "lvs0/data"]
    assert found.files == ["/usr/share/OVMF.fd", "/dev/sdz"]
    assert found.machine == ["/usr/bin/qemu", "x86_64", "q35", "qemu"]


@pytest.mark.parametrize(
    ("given", "stays"),
    [
        ({"os": "", "devices": "<tpm><backend type='passthrough'/></tpm>"}, []),
        ({"os": "<nvram>/x</nvram>", "devices": ""}, ["its UEFI variables"]),
        (
            {"os": "", "devices": "<tpm><backend type='emulator'/></tpm>"},
            ["the state of its TPM"],
        ),
    ],
)
def test_what_of_a_domain_stays_on_its_host(given: dict[str, Any], stays: list[str]) -> None:
    assert domainxml.state_on_host(XML.format(**given)) == stays
