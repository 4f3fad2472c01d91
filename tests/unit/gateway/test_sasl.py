"""SASL towards libvirtd: what auth.conf may hold, and a libvirtd that does not keep to SCRAM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import scramp

from plugin.gateway import sasl
from plugin.gateway.errors import Refused
from plugin.gateway.procs import Proc
from plugin.gateway.xdr import Reader, Writer
from tests.unit.gateway.world import ReplyError, World, disk, play

AUTH_CONF = "[credentials-gw]\nauthname=virtlun\npassword={}\n[auth-libvirt-{}]\ncredentials=gw\n"


@pytest.mark.parametrize("service", ["localhost", "default"])
@pytest.mark.parametrize("password", ["simple", "100%d; # no comment", "[x] = y", "пароль"])
def test_auth_conf_has_name_and_password(tmp_path: Path, service: str, password: str) -> None:
    file = tmp_path / "auth.conf"
    file.write_text(AUTH_CONF.format(password, service), encoding="utf-8")
    found = sasl.credentials(file)
    assert (found.name, found.password) == ("virtlun", password)
    assert password not in repr(found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no "),
        ("", "has no name and password for libvirt on localhost"),
        (AUTH_CONF.format("p", "other.example"), "has no name and password"),
        (AUTH_CONF.format("", "localhost"), "has no name and password"),
        ("[auth-libvirt-localhost]\ncredentials=missing\n", "has no name and password"),
        ("password=before any section\n", "is not such a file"),
        ("[half\n", "is not such a file"),
    ],
)
def test_what_is_missing_is_told_with_what_to_write(
    tmp_path: Path, text: str | None, why: str
) -> None:
    file = tmp_path / "auth.conf"
    if text is not None:
        file.write_text(text)
    with pytest.raises(Refused) as error:
        sasl.credentials(file)
    said = str(error.value)
    assert why in said and str(file) in said and "write [auth-libvirt-localhost]" in said


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        sasl.credentials(tmp_path)


class Libvirtd:
    """The other side of `authenticate`, by the same library; each message may be replaced."""

    def __init__(self, password: str = "secret", **replaced: str) -> None:
        mechanism = scramp.ScramMechanism("SCRAM-SHA-256")
        stored = mechanism.make_auth_info(password)
        self._server = mechanism.make_server(lambda _: stored)
        self._replaced = replaced
        self.mechanisms = "GSSAPI,SCRAM-SHA-256,SCRAM-SHA-1"
        self.calls: list[int] = []
        self.completes = True

    async def exchange(self, procedure: int, payload: bytes) -> bytes:
        self.calls.append(procedure)
        if procedure == Proc.AUTH_SASL_INIT:
            return bytes(Writer().string(self.mechanisms))
        reader = Reader(payload)
        if procedure == Proc.AUTH_SASL_START:
            assert reader.string() == "SCRAM-SHA-256"
        assert reader.i32() == 0
        said = bytes(reader.array(reader.u32, sasl.DATA_MAX)).decode()
        if procedure == Proc.AUTH_SASL_START:
            self._server.set_client_first(said)
            return self._reply("first", self._server.get_server_first(), complete=False)
        if not said:  # after the last message of SCRAM
            return self._reply("", "", complete=False)
        self._server.set_client_final(said)
        return self._reply("final", self._server.get_server_final(), complete=self.completes)

    def _reply(self, name: str, text: str, *, complete: bool) -> bytes:
        data = self._replaced.get(name, text).encode()
        writer = Writer().i32(int(complete)).i32(0)
        return bytes(writer.array(list(data), writer.u32))


def authenticate(tmp_path: Path, libvirtd: Libvirtd) -> None:
    file = tmp_path / "auth.conf"
    file.write_text(AUTH_CONF.format("secret", "localhost"))
    asyncio.run(sasl.authenticate(libvirtd.exchange, file))


def test_three_messages_are_enough(tmp_path: Path) -> None:
    libvirtd = Libvirtd()
    authenticate(tmp_path, libvirtd)
    assert libvirtd.calls == [Proc.AUTH_SASL_INIT, Proc.AUTH_SASL_START, Proc.AUTH_SASL_STEP]


@pytest.mark.parametrize(
    "replaced",
    [
        {"first": ""},
        {"first": "r=other,s=AAAA,i=4096"},
        {"first": "nonsense"},
        {"final": "v=AAAA"},
        {"final": "e=other-error"},
        {"final": ""},
    ],
)
def test_a_libvirtd_that_does_not_prove_itself_is_refused(
    tmp_path: Path, replaced: dict[str, str]
) -> None:
    with pytest.raises(Refused, match=r"^SASL with libvirtd \(SCRAM-SHA-256\): "):
        authenticate(tmp_path, Libvirtd(**replaced))


def test_a_libvirtd_that_never_ends_is_refused(tmp_path: Path) -> None:
    libvirtd = Libvirtd()
    libvirtd.completes = False
    with pytest.raises(Refused, match=r"does not end SASL \(SCRAM-SHA-256\)"):
        authenticate(tmp_path, libvirtd)
    assert libvirtd.calls.count(Proc.AUTH_SASL_STEP) == 2


@pytest.mark.parametrize("offered", ["", "GSSAPI", "DIGEST-MD5,PLAIN"])
def test_mechanisms_that_we_do_not_know_are_named(tmp_path: Path, offered: str) -> None:
    libvirtd = Libvirtd()
    libvirtd.mechanisms = offered
    with pytest.raises(Refused, match="add one to mech_list"):
        authenticate(tmp_path, libvirtd)
    assert libvirtd.calls == [Proc.AUTH_SASL_INIT]


def test_a_client_is_told_in_one_sentence(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        dom = world.domain()
        client = await world.client()
        world.libvirtd.auth_type = 1
        with pytest.raises(ReplyError, match="libvirtd asks for SASL, and there is no "):
            await client.attach(dom.ref, disk(), 1)

    play(tmp_path, body, auth_conf=tmp_path / "none")
