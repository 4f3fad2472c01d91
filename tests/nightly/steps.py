"""The steps of a night: what is run, what it needs of the machine, and which paths it tests."""

from __future__ import annotations

import enum
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cache import LOCAL, ROOT

MANIFEST = str(ROOT / "pydataplane/Cargo.toml")
#: Logs and results.
RESULTS = LOCAL / "nightly"
#: Crates with unsafe code of their own that Miri can run: it knows no io_uring and no mmap.
MIRI_CRATES = ("guestmem", "virtqueue")
#: Rounds of property tests, each with as many new examples as `make test` takes.
RANDOM_ROUNDS = 20
#: Seconds of each fuzz target.
FUZZ_S = 600
FUZZ_TARGETS = 16
MINUTE_S = 60


class Lane(enum.Enum):
    """What a step may run beside."""

    GUESTS = "guests"
    """It waits for guests and servers much of its time."""
    COMPUTING = "computing"
    """It keeps a processor or more busy, whoever else runs; one after the other."""
    MEASURING = "measuring"
    """Alone, after all others."""


@dataclass(frozen=True)
class Step:
    """One command of the night."""

    about: str
    #: About how long it takes on a machine with two processors where the others run beside it.
    minutes: int
    lane: Lane
    command: list[str]
    #: What decides its result, relative to the checkout. Every file of the repository counts that
    #: the command reads, or that its programs are built from.
    paths: tuple[str, ...]
    #: Why it cannot run here; None: it can.
    missing: Callable[[], str | None] = lambda: None
    environment: dict[str, str] = field(default_factory=dict)


def _answers(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _nightly() -> str | None:
    if _answers("cargo", "+nightly", "--version"):
        return None
    return "no nightly toolchain: rustup toolchain install nightly"


def _miri() -> str | None:
    if _answers("cargo", "+nightly", "miri", "--version"):
        return None
    return "no Miri: rustup +nightly component add miri rust-src"


def _sources() -> str | None:
    if why := _nightly():
        return why
    asked = subprocess.run(
        ["rustc", "+nightly", "--print", "sysroot"], capture_output=True, text=True, check=False
    )
    library = Path(asked.stdout.strip()) / "lib/rustlib/src/rust/library/std"
    return None if library.is_dir() else "no sources of std: rustup +nightly component add rust-src"


def _cargo(*words: str, toolchain: str = "") -> list[str]:
    chosen = [toolchain] if toolchain else []
    return ["cargo", *chosen, *words, "--manifest-path", MANIFEST]


def _pytest(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *words]


def _module(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", name, *words]


def _again(*command: str) -> list[str]:
    return _module("tests.nightly.repeat", "--rounds", str(RANDOM_ROUNDS), "--", *command)


def _tests_with(*words: str, folder: str = "tests") -> list[str]:
    """Returns the files of tests below a folder in which one of these words stands."""
    files = sorted((ROOT / folder).rglob("test_*.py"))
    texts = ((file, file.read_text()) for file in files)
    return [
        str(file.relative_to(ROOT)) for file, text in texts if any(each in text for each in words)
    ]


def _sanitized(kind: str) -> dict[str, str]:
    return {
        "RUSTFLAGS": f"-Zsanitizer={kind}",
        "RUSTDOCFLAGS": f"-Zsanitizer={kind}",
        "CARGO_TARGET_DIR": str(RESULTS / f"target-{kind}"),
        # One that is given would be shared by kinds.
        "CARGO_BUILD_BUILD_DIR": str(RESULTS / f"target-{kind}"),
        "CARGO_INCREMENTAL": "0",
    }


#: What the data plane's own tests read; some crates share a file with the fuzz targets.
RUST = ("pydataplane", "schemas", "tests/fuzz", "rust-toolchain.toml")
#: What is installed in .venv, and how pytest runs.
INSTALLED = (
    *("pydataplane", "plugin", "csi", "schemas", "setup.py", "pyproject.toml"),
    *("requirements.lock", "rust-toolchain.toml", "tests/conftest.py", "tests/__init__.py"),
)
WITH_GUESTS = (*INSTALLED, "tests/support", "tests/guest")
WITH_NEWEST = (
    *(*WITH_GUESTS, "examples", "tests/demo", "tests/docs", "tests/libvirt"),
    *("tests/nightly/newest.py", "tests/bench", "tests/kubernetes", "tests/openstack"),
    *("tests/target", "tests/unit"),
)
#: Files with tests that are left out unless `-m nightly` is said.
LONG_TESTS = _tests_with("pytest.mark.nightly", "at_night(", "by_day(")
LIBVIRT_TESTS = _tests_with("def test_", folder="tests/libvirt")
#: Of the night's tests of libvirt, those of which another version's answers are most likely others.
NEWEST_NIGHT = (
    *("tests/libvirt/test_virsh_commands.py", "tests/libvirt/test_iotune.py"),
    *("tests/libvirt/test_polkit.py", "tests/libvirt/test_pool_polkit.py"),
)
PROPERTY_TESTS = _tests_with("from hypothesis import", folder="tests/unit")
#: Beside what is installed, what property tests read.
PROPERTY = ("tests/unit", "tests/kubernetes/kubevirt", "tests/kubernetes/__init__.py", "examples")
SANITIZED = ("--locked", "--lib", "--tests", "--target", "x86_64-unknown-linux-gnu")


def _bench(name: str, about: str, minutes: int, *words: str, more: tuple[str, ...] = ()) -> Step:
    """Returns the step that runs a module of the benchmark, or the whole if `name` is empty.

    `more` are paths that it has beside the benchmark's.
    """
    module = f"tests.bench.{name}" if name else "tests.bench"
    paths = (*WITH_GUESTS, "tests/bench", *more)
    return Step(about, minutes, Lane.MEASURING, _module(module, *words), paths)


def _bench_kubernetes(name: str, about: str, minutes: int) -> Step:
    """Returns the step that measures on Kubernetes."""
    paths = (*WITH_GUESTS, "examples", "tests/kubernetes")
    return Step(about, minutes, Lane.MEASURING, _module(f"tests.kubernetes.{name}"), paths)


#: Texts beside the site's own pages that are pages of it.
TEXTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE")
#: What ThreadSanitizer takes for races and why they are none.
RACES = "tests/nightly/races.supp"
#: Tests that map terabytes of memory, or look whether some is untouched: ThreadSanitizer keeps most
#: addresses to itself, and writes the zeros of what is allocated as such.
OF_MEMORY = (
    "a_guest_gets_no_more_addresses_than_a_process_has",
    "what_is_beside_the_table_counts_with_it_as_long_as_it_is_there",
    "a_large_untouched_buffer_has_no_memory_before_it_is_used",
)
#: In each lane those first that take longest.
STEPS = {
    "long": Step(
        "restarts, crashes and migrations by the hundred, and what the day leaves out",
        150,
        Lane.GUESTS,
        # What passed is printed, too: seeds, pauses and counts.
        _pytest("-m", "nightly", "-n", "2", "-raP", "--durations=0", *LONG_TESTS),
        (
            *WITH_GUESTS,
            *("examples", "tests/bench", "tests/demo", "tests/libvirt", "tests/openstack"),
            *("tests/target", "tests/kubernetes", "tests/crash", "tests/unit"),
            *("tests/again.py", "tests/docs", "tests/fuzz", "tests/release.py"),
            "docs/pages/how-to/move-a-claim.md",
        ),
    ),
    "newest": Step(
        "libvirt's tests of the day with the newest libvirt and QEMU of Debian's backports",
        20,
        Lane.GUESTS,
        _module("tests.nightly.newest", *_pytest("-m", "not nightly", "-n", "2", *LIBVIRT_TESTS)),
        WITH_NEWEST,
    ),
    "newest-night": Step(
        "the night's tests of virsh's commands, limits of I/O and polkit with these",
        15,
        Lane.GUESTS,
        _module("tests.nightly.newest", *_pytest("-m", "nightly", "-n", "2", *NEWEST_NIGHT)),
        (*WITH_NEWEST, "docs/pages/reference/virsh.md"),
    ),
    "e2e": Step(
        "Kubernetes' own suite for storage drivers",
        60,
        Lane.GUESTS,
        _module("tests.kubernetes.e2e"),
        (*INSTALLED, "examples", "tests/support", "tests/kubernetes"),
    ),
    "demo": Step(
        "the demo, whose steps are checked as they are told",
        2,
        Lane.GUESTS,
        _module("tests.demo"),
        (*WITH_GUESTS, "examples", "tests/demo"),
    ),
    "demo-ceph": Step(
        "the demo of Ceph, whose steps are checked as they are told",
        2,
        Lane.GUESTS,
        _module("tests.demo.ceph"),
        (*WITH_GUESTS, "examples", "tests/demo"),
    ),
    "demo-openstack": Step(
        "the demo of OpenStack, whose steps are checked as they are told",
        3,
        Lane.GUESTS,
        _module("tests.demo.openstack"),
        (*WITH_GUESTS, "examples", "tests/demo", "tests/openstack"),
    ),
    "demo-kubernetes": Step(
        "the demo of Kubernetes, whose steps are checked as they are told",
        5,
        Lane.GUESTS,
        _module("tests.kubernetes"),
        (*WITH_GUESTS, "examples", "tests/kubernetes"),
    ),
    "fuzz": Step(
        f"every fuzz target for {FUZZ_S} s, as many at a time as there are processors, and one"
        " more, with AddressSanitizer",
        -(-FUZZ_TARGETS // (2 + 1)) * FUZZ_S // MINUTE_S + 5,
        Lane.COMPUTING,
        _module("tests.fuzz", "--seconds", str(FUZZ_S), "--sanitize"),
        (*RUST, "tests/support/cache.py"),
        _nightly,
    ),
    "miri": Step(
        "unsafe code under Miri",
        30,
        Lane.COMPUTING,
        _cargo("miri", "test", *(f"-p{crate}" for crate in MIRI_CRATES), toolchain="+nightly"),
        RUST,
        _miri,
        {
            # A guest's address is a number until it is looked up.
            "MIRIFLAGS": "-Zmiri-disable-isolation -Zmiri-permissive-provenance",
            "CARGO_TARGET_DIR": str(RESULTS / "target-miri"),
        },
    ),
    "tsan": Step(
        "the data plane's tests under ThreadSanitizer",
        30,
        Lane.COMPUTING,
        # Without a standard library that is instrumented, its channels and Arcs are reported.
        [
            *_cargo("test", "-Zbuild-std", *SANITIZED, "--no-fail-fast", toolchain="+nightly"),
            *("--", *(word for name in OF_MEMORY for word in ("--skip", name))),
        ],
        (*RUST, RACES),
        _sources,
        _sanitized("thread") | {"TSAN_OPTIONS": f"suppressions={ROOT / RACES}"},
    ),
    "asan": Step(
        "the data plane's tests under AddressSanitizer",
        20,
        Lane.COMPUTING,
        _cargo("test", *SANITIZED, toolchain="+nightly"),
        RUST,
        _nightly,
        _sanitized("address"),
    ),
    "random-rust": Step(
        f"property and power-cut tests {RANDOM_ROUNDS} times, with new examples",
        20,
        Lane.COMPUTING,
        _again(*_cargo("test", "--quiet", "--locked", "--lib", "--tests")),
        (*RUST, "tests/nightly/repeat.py"),
        environment={"VIRTLUN_LVOL_CASES": "100", "VIRTLUN_PROTECTION_SEEDS": "2"},
    ),
    "release": Step(
        "a release, built twice and compared, and its wheel's programs",
        20,
        Lane.COMPUTING,
        _module("tests.release", "--check"),
        (*INSTALLED, *TEXTS, "MANIFEST.in", "tests/release.py"),
    ),
    "simulate": Step(
        "10,000 seeds of the store on a device that fails in all ways, and all orders of scripts",
        15,
        Lane.COMPUTING,
        _cargo(
            *("test", "--quiet", "--locked", "-p", "blobstore"),
            *("--test", "blobs", "--", "simulate::", "crash::"),
        ),
        RUST,
        environment={"VIRTLUN_SIM_SEEDS": "10000", "VIRTLUN_CRASH_SUBSETS": "65536"},
    ),
    "large": Step(
        "the memory of a full lvstore of 10 TiB with 10,000 volumes in clusters of 64 KiB",
        10,
        Lane.COMPUTING,
        _cargo(
            "test", "--release", "--locked", "-p", "lvol", "--test", "large", "--", "--nocapture"
        ),
        RUST,
        environment={"VIRTLUN_LARGE": "1"},
    ),
    "checksums": Step(
        "50 seeds of a bdev with checksums, whose power is cut at each write and flush",
        10,
        Lane.COMPUTING,
        _cargo("test", "--quiet", "--locked", "-p", "integrity", "--lib", "crash"),
        RUST,
        environment={"VIRTLUN_INTEGRITY_SEEDS": "50"},
    ),
    "silent": Step(
        "2000 seeds of one on a disk that loses, garbles and misplaces what is written to it",
        10,
        Lane.COMPUTING,
        _cargo("test", "--quiet", "--locked", "-p", "integrity", "--lib", "silent"),
        RUST,
        environment={"VIRTLUN_INTEGRITY_SEEDS": "2000"},
    ),
    "random-python": Step(
        f"property tests {RANDOM_ROUNDS} times, with new examples",
        10,
        Lane.COMPUTING,
        _again(*_pytest(*PROPERTY_TESTS)),
        (*INSTALLED, *PROPERTY, "tests/support", "tests/nightly/repeat.py"),
        environment={"HYPOTHESIS_PROFILE": "random"},
    ),
    "docs": Step(
        "the site, with all files that its pages show",
        2,
        Lane.COMPUTING,
        ["make", "docs"],
        (
            "docs",
            "examples",
            "schemas",
            "plugin",
            "csi",
            "pydataplane",
            "tests",
            *TEXTS,
            "Makefile",
        ),
    ),
    "library": Step(
        "what is written of the crate for others, with every link",
        2,
        Lane.COMPUTING,
        _cargo("doc", "--quiet", "--locked", "--no-deps", "-p", "blobstore"),
        RUST,
        environment={"RUSTDOCFLAGS": "-Dwarnings"},
    ),
    "bench": _bench("", "the whole benchmark", 10),
    "bench-noisy": _bench("noisy", "a verified reader beside each hostile neighbour", 10, "--goal"),
    "bench-interrupts": _bench("interrupts", "interrupts per I/O of a guest that sleeps", 5),
    "bench-queues": _bench("queues", "two queues on two reactors and on one", 2),
    "bench-limits": _bench(
        "limits", "how exactly limits of I/O are kept, and how soon", 2, "--goal"
    ),
    "bench-attach": _bench(
        *("attach", "attach by libvirt, and by Nova's driver", 5, "--nova"),
        more=("examples", "tests/openstack"),
    ),
    "bench-controller": _bench("controller", "the memory that an empty controller costs a VM", 2),
    "bench-gateway": _bench(
        "gateway", "the calls of 2,000 domains, by the gateway and directly", 30
    ),
    "bench-upgrade": _bench("upgrade", "the pause of an upgrade, and memory a peer", 5, "--goal"),
    "bench-idle": _bench("idle", "what 64 guests cost that do nothing", 3),
    "bench-pauses": _bench("pauses", "how long a guest and a pod wait when their target goes", 5),
    "bench-pods": _bench("pods", "a pod's volume beside a plain loop device", 5),
    "bench-ublk": _bench("ublk", "a ublk device beside loop devices, in a guest", 10),
    "bench-rbd": _bench("rbd", "images of Ceph beside qemu-storage-daemon", 15),
    "bench-snapshots": _bench("snapshots", "what snapshots and clones cost", 5, "--goal"),
    "bench-many": _bench("many", "calls about a volume among 10,000", 2),
    "bench-layers": _bench("layers", "volumes and clones beside the bdev below", 5),
    "bench-cold": _bench("cold", "first writes, by the size of clusters", 10),
    "bench-kv": _bench("kv", "a key-value store on blobs beside RocksDB", 5),
    "bench-claims": _bench_kubernetes("bench", "how long a claim takes to be bound", 5),
    "bench-machines": _bench_kubernetes(
        "kubevirt", "how long a machine waits for a disk, and for its growth", 5
    ),
}
