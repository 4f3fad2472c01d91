"""What a bug report leaves out, and how it comes into its file."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from plugin.cli.report import hidden, without_secrets, write_new


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("iscsi://user%pass@host:3260/iqn.a/0", "iscsi://***@host:3260/iqn.a/0"),
        ("iscsi://h/t/0?target_user=u&target_password=p&x=1", None),
        ('{"name": "k0", "key": "00112233", "key2": "44"}', None),
        (
            r'params="{\"key\":\"0011\",\"name\":\"k0\"}"',
            r'params="{\"key\":\"***\",\"name\":\"k0\"}"',
        ),
        ("password = 'secret of mine'", "password = '***'"),
        ('keyring = "/etc/ceph/keyring"', 'keyring = "/etc/ceph/keyring"'),
        ("/var/lib/virtlun/lvs0.img", "/var/lib/virtlun/lvs0.img"),
    ],
)
def test_no_line_has_a_secret(line: str, told: str | None) -> None:
    shown = without_secrets(line)
    if told is not None:
        assert shown == told
    for secret in ("pass@", "target_password=p", "0011", '"44"', "secret of mine"):
        assert secret not in shown


def test_no_answer_has_a_secret() -> None:
    answer = {
        "name": "k0",
        "key": "0011",
        "key_file": "/etc/key",
        "method": {"params": [{"password": "mine", "url": "iscsi://user%pass@host/t/0"}]},
    }
    shown = hidden(answer)
    assert shown["name"] == "k0" and shown["key_file"] == "/etc/key"
    assert "0011" not in json.dumps(shown)
    assert shown["method"]["params"] == [{"password": "***", "url": "iscsi://***@host/t/0"}]


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so a write beyond that fails as one to a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            write_new(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.filename == path
    assert list(tmp_path.iterdir()) == []
    write_new(path, "whole")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("whole", 0o600)
    with pytest.raises(FileExistsError):
        write_new(path, "another")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["whole"]
