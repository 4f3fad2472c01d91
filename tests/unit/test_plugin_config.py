"""virtlun.toml: the models, the schema made of them and the example agree."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from plugin.config import Config, load, schema
from plugin.gateway.server import Gateway
from pydataplane import emulator
from pydataplane.domain.errors import LIBVIRT, ConfigError, Refusal
from pydataplane.domain.model import Allowed
from pydataplane.domain.translate import Settings, recognise
from tests.support.examples import used
from tests.unit.translate.domains import ROOT

SCHEMA = ROOT / "schemas/config/plugin.schema.json"
EXAMPLE = ROOT / "examples/virtlun.toml"


def test_the_schema_is_the_models() -> None:
    assert json.loads(SCHEMA.read_text()) == schema(), (
        "write it anew: python -m plugin.config > schemas/config/plugin.schema.json"
    )


def test_the_example_is_valid_and_shows_the_defaults() -> None:
    values = tomllib.loads(EXAMPLE.read_text())
    jsonschema.validate(values, schema())
    assert load(used(EXAMPLE)) == Config()


def test_the_example_shows_every_key() -> None:
    values = tomllib.loads(EXAMPLE.read_text())
    for section in ("target", "disks", "gateway", "hook"):
        known: set[str] = set(getattr(Config(), section).model_dump())
        assert set(values[section]) == known


def test_settings_of_an_empty_file_are_the_translations_defaults() -> None:
    assert Config().settings() == Settings(
        qemu_reconnects=emulator.reconnects,
        qemu_lacks_scsi=emulator.lacks_scsi,
        qemu_protects=emulator.protects,
    )


def test_every_setting_of_the_file_reaches_gateway_and_translation() -> None:
    config = Config.model_validate(
        {
            "target": {"vhost_dir": "/v"},
            "disks": {
                "path_prefix": "/p/",
                "rbd_prefix": "r/",
                "protocol": "x",
                "pool_prefix": "q-",
                "max_queues": 3,
                "reconnect_s": 2,
                "front_end": "blk",
                "serve_network": ["nbd"],
                "serve_network_on_request": ["rbd"],
                "own_keyring": True,
                "nbd_sockets": ["/run/nbd"],
                "iscsi_portals": ["10.0.0.0/24"],
                "protection": True,
            },
        }
    )
    defaults, settings = Settings(), Gateway(config).services.settings
    expected = Settings(
        *("/v", "/p/", "r/", "x", "q-", 3, 2, emulator.reconnects),
        front_end="blk",
        network=frozenset({"nbd"}),
        on_request=frozenset({"rbd"}),
        allowed=Allowed(True, ("/run/nbd",), ("10.0.0.0/24",)),
        qemu_lacks_scsi=emulator.lacks_scsi,
        protection=True,
        qemu_protects=emulator.protects,
    )
    assert settings == expected == config.settings()
    for name in (field.name for field in fields(Settings)):
        assert getattr(settings, name) != getattr(defaults, name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[target]\nrpc_sockt = 'x'", "target.rpc_sockt: Extra inputs"),
        ("[disks]\nmax_queues = 0", "disks.max_queues: .*greater than or equal to 1"),
        ("[disks]\nmax_queues = 65", "disks.max_queues: .*less than or equal to 64"),
        ("[hook]\ndeadline_s = 'soon'", "hook.deadline_s: "),
        ("[disks]\npath_prefix = 'dev/'", "disks.path_prefix: "),
        ("[disks]\nreconnect_s = 3601", "disks.reconnect_s: .*less than or equal to 3600"),
        ("[disks]\nprotection = 'some'", "disks.protection: .*boolean"),
        ("[disks]\nreconnect_s = 'never'", "disks.reconnect_s: .*integer.* or .*'auto'$"),
        (
            "[disks]\niscsi_portals = ['10.0.0.0/33']",
            "disks.iscsi_portals.*'10.0.0.0/33' is no name",
        ),
        ("[typo]", "typo: Extra inputs"),
        ("[", "virtlun.toml: "),
    ],
)
def test_a_wrong_file_is_one_sentence_with_file_and_key(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "virtlun.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load(file)
    assert str(caught.value).startswith(str(file))


@pytest.mark.parametrize(("old", "new"), [("true", "all"), ("false", "needed")])
def test_the_key_of_old_is_one_sentence_that_says_the_new_one(
    tmp_path: Path, old: str, new: str
) -> None:
    file = tmp_path / "virtlun.toml"
    file.write_text(f"[gateway]\nalways_controller = {old}\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert str(caught.value) == (
        f"{file}: gateway.always_controller is no key any more; write"
        f' controllers = "{new}" in its place'
    )


@pytest.mark.parametrize(
    ("listen", "word", "expected"),
    [
        ("/run/virtlun/libvirt-sock", "auto", True),
        ("/run/libvirt/libvirt-sock", "auto", False),
        ("/var/run/libvirt/virtqemud-sock", "auto", False),
        ("/run/libvirt/libvirt-sock", "all", True),
        ("/run/virtlun/libvirt-sock", "needed", False),
    ],
)
def test_who_gets_a_controller_follows_from_where_the_gateway_listens(
    listen: str, word: str, expected: bool
) -> None:
    config = Config.model_validate({"gateway": {"listen": listen, "controllers": word}})
    assert config.gateway.controllers_for_all is expected


def test_the_example_in_libvirtds_place_gives_controllers_where_needed() -> None:
    config = load(ROOT / "examples/libvirt/transparent/virtlun.toml")
    assert config.gateway.controllers_for_all is False


def test_the_example_for_nova_readies_every_instance_and_makes_no_volume() -> None:
    folder = ROOT / "examples/openstack"
    config = load(used(folder / "virtlun.toml"))
    assert config.gateway.controllers_for_all
    assert config.hook.create_missing_mib == 0
    socket = config.gateway.listen
    for name in ("nova.conf", "nova-ceph.conf"):
        nova = configparser.ConfigParser(interpolation=None)
        nova.read_string(used(folder / name).read_text())
        assert nova["libvirt"]["connection_uri"] == f"qemu+unix:///system?socket={socket}"
    # The last one's, from gateway to gateway.
    assert nova["libvirt"]["live_migration_uri"] == f"qemu+ssh://nova@%s/system?socket={socket}"


def test_a_missing_file_is_an_error_only_if_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "examples/libvirt").glob("disk*.xml")), ids=str)
def test_each_example_disk_is_recognised(path: Path) -> None:
    ref = recognise(path.read_text(), Config().settings())
    assert ref is not None
    assert ref.lvstore == "lvs0"


def test_a_controller_may_have_no_more_queues_than_the_target_serves() -> None:
    source = (ROOT / "pydataplane/crates/vhost/src/defs.rs").read_text()
    (most,) = re.findall(r"MAX_REQUEST_QUEUES: usize = (\d+);", source)
    config = json.loads((ROOT / "schemas/config/plugin.schema.json").read_text())
    assert config["$defs"]["DisksSection"]["properties"]["max_queues"]["maximum"] == int(most)


def test_each_refusal_has_a_libvirt_code() -> None:
    assert set(LIBVIRT) == set(Refusal)
    numbers: list[Any] = [code.code for code in LIBVIRT.values()]
    assert all(1 <= number <= 110 for number in numbers)
