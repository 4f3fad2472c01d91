"""Builds and installs virtlun: the Python packages and, in release profile, the Rust programs.

With VIRTLUN_NO_PROGRAMS=1 it leaves the programs to whoever has built them (`make LEAN=1`).
"""

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools_rust import RustBin

MANIFEST = "pydataplane/Cargo.toml"


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3 on this platform: it holds programs, not an extension module."""

    def finalize_options(self) -> None:
        """Marks the wheel as one with compiled content."""
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        """Returns the wheel's tag with the platform alone kept."""
        return "py3", "none", super().get_tag()[2]


def program(name: str, crate: str) -> RustBin:
    """Returns the build step of one Rust program; `crate` is its folder under crates/."""
    return RustBin(
        name,
        path=f"pydataplane/crates/{crate}/Cargo.toml",
        args=["--bin", name],
        cargo_manifest_args=["--locked"],
        debug=False,
    )


PROGRAMS = [
    program("virtlun-target", "target"),
    program("virtlun-holder", "target"),
    program("virtlun-bench", "initiator"),
]

setup(
    data_files=[("share/man/man1", sorted(map(str, Path("docs/man").glob("*.1"))))],
    rust_extensions=[] if os.environ.get("VIRTLUN_NO_PROGRAMS") else PROGRAMS,
    cmdclass={"bdist_wheel": PlatformWheel},
)
