"""The Python of this machine and this checkout for a guest, beside what `program_disk` packs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.support import program_disk

ROOT = Path(__file__).parents[2]
OURS = ("csi", "plugin", "pydataplane")
#: What the guest's programs never import, and tests, by far the most of it.
LEFT_OUT = shutil.ignore_patterns(
    *("test", "tests", "idlelib", "tkinter", "lib2to3", "ensurepip", "site-packages", "*.a"),
    *("config-3*", "_tkinter*", "pydoc_data", "turtledemo", "crates", "target", "__pycache__"),
)
#: Of the modules that it runs: where their files are.
FIND = """
import sys, {modules}
found = {{getattr(each, "__file__", None) for each in list(sys.modules.values())}}
print("\\n".join(sorted(each for each in found if each)))
"""


def add(tree: Path, modules: tuple[str, ...]) -> None:
    """Adds Python, with all that these modules import, to a tree that becomes a disk.

    subprocess.CalledProcessError if one of them cannot be imported here.
    """
    script = FIND.format(modules=", ".join(modules))
    words = [sys.executable, "-c", script]
    files = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    site = Path(sysconfig.get_path("purelib"))
    packages = {
        Path(each).relative_to(site).parts[0]
        for each in files.splitlines()
        if Path(each).is_relative_to(site)
    }
    python = tree / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = python / "lib" / version
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=LEFT_OUT)
    (library / "site-packages").mkdir()
    for name in packages:
        source = site / name
        if source.is_dir():
            shutil.copytree(source, library / "site-packages" / name, ignore=LEFT_OUT)
        else:
            shutil.copy(source, library / "site-packages")
    for name in OURS:
        shutil.copytree(ROOT / name, library / "site-packages" / name, ignore=LEFT_OUT)
    for info in site.glob("*.dist-info"):  # click asks for the version of virtlun
        shutil.copytree(info, library / "site-packages" / info.name)
    (python / "bin").mkdir()
    program = python / "bin/python3"
    shutil.copy(Path(sys.executable).resolve(), program)
    for binary in (program, *library.rglob("*.so")):
        program_disk.copy_libraries(binary, tree / "lib")
    # it is compiled once here and not at each start in a guest that is slow
    subprocess.run(
        [
            sys.executable,
            "-m",
            "compileall",
            "-q",
            "--invalidation-mode",
            "unchecked-hash",
            library,
        ],
        check=False,  # some files of packages are templates
        capture_output=True,
    )


def run(*words: str) -> str:
    """Returns the command that runs Python there with these words, which the shell reads."""
    python = f"{program_disk.PLACE}/python"
    place = f"PATH={program_disk.PLACE}:$PATH PYTHONHOME={python} PYTHONDONTWRITEBYTECODE=1"
    start = f"env LD_LIBRARY_PATH={program_disk.PLACE}/lib {place} {python}/bin/python3"
    return " ".join([start, *words])
