"""The examples of examples/openstack for Cinder, which is not there: tests/openstack runs them."""

from __future__ import annotations

import ast
import configparser

from plugin.config import Config
from tests.support.examples import ROOT, used

FOLDER = ROOT / "examples/openstack"


def tree(module: str) -> ast.Module:
    """Returns what is in a module of ours that only Cinder's Python can import."""
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())


def test_the_backend_names_the_driver_and_options_of_it() -> None:
    config = configparser.ConfigParser()
    config.read_string(used(FOLDER / "cinder.conf").read_text())
    backend = config[config["DEFAULT"]["enabled_backends"]]
    module, _, name = backend["volume_driver"].rpartition(".")
    assert name in [each.name for each in tree(module).body if isinstance(each, ast.ClassDef)]
    options = {
        call.args[0].value
        for call in ast.walk(tree("plugin.openstack.options"))
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant)
    }
    ours = {key for key in backend if key.startswith("virtlun_")}
    assert "virtlun_lvstore" in ours <= options
    assert backend["virtlun_rpc_socket"] == str(Config().target.rpc_socket)


def test_rootwrap_lets_the_driver_run_what_it_runs() -> None:
    filters = configparser.ConfigParser()
    filters.read_string(used(FOLDER / "virtlun.filters").read_text())
    assert dict(filters["Filters"]) == {"losetup": "CommandFilter, losetup, root"}
    loops = (ROOT / "plugin/openstack/loops.py").read_text()
    assert loops.count("self._run(") == loops.count('self._run("losetup"') == 1
