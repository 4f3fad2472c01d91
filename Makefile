# virtlun: `make help` lists the targets. Each does the set-up that it needs; CI runs the same ones.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
CACHE := .cache
CARGO := cargo --config net.retry=5
MANIFEST := pydataplane/Cargo.toml
# The pinned compiler may be there as `stable`: rustup need not fetch it then.
ifneq (,$(findstring "$(shell rustc +stable --version 2>/dev/null | cut -d' ' -f2)",$(file < rust-toolchain.toml)))
export RUSTUP_TOOLCHAIN := stable
endif
# What is kept for every checkout, as tests/support/cache.py has it.
KEPT := $(or $(VIRTLUN_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/virtlun)
# LEAN=1, as in CI, builds what only tests run: the programs as `cargo test` has built them, with the
# checks of a debug build, and without line tables, as a panic says where it was; and on crates, and
# what mypy knows of modules by their content, that outlive the checkout.
ifdef LEAN
export CARGO_PROFILE_DEV_DEBUG := 0
export CARGO_INCREMENTAL := 0
export CARGO_BUILD_BUILD_DIR := $(shell pydataplane/cargo-build-dir)
export MYPY_CACHE_DIR := $(KEPT)/mypy
endif
# Some machines' images set it. What Python then compiles again, at each start of a program of ours and
# in each of pytest's processes, is a third of what those take to begin, and more.
export PYTHONDONTWRITEBYTECODE :=
RUST_SOURCES := $(shell find pydataplane/Cargo.toml pydataplane/Cargo.lock pydataplane/crates -name '*.rs' -o -name 'Cargo.*' 2>/dev/null)

# What the demo and the tests need of Debian 12: QEMU, libvirt, polkit, Ceph, servers of NBD and iSCSI, a compiler, tools for the guest.
APT_PACKAGES := build-essential busybox-static ca-certificates ceph-common ceph-mon ceph-osd cpio \
	dbus-daemon ddpt e2fsprogs groff-base iproute2 kmod libiscsi-bin libiscsi7 librbd1 libsasl2-modules libssl-dev libvirt-clients \
	libvirt-daemon-system libvirt-dev linux-libc-dev lz4 mount nbdkit pkg-config polkitd python3-dev python3-venv \
	qemu-system-x86 qemu-utils sasl2-bin sg3-utils strace systemd tgt util-linux valgrind virtinst xfsprogs \
	xz-utils zstd
# And of what measures, and the tests of the night.
BENCH_PACKAGES := fio qemu-block-extra rocksdb-tools
# And of what the night looks at: an image that is built, Cockpit in a browser, virt-manager on a screen, a whole
# Nova, other shells.
NIGHT_PACKAGES := at-spi2-core buildah chromium cockpit-bridge cockpit-machines cockpit-system cockpit-ws \
	debootstrap fish gir1.2-atspi-2.0 grub-common grub-pc-bin postgresql rabbitmq-server virt-manager xvfb zsh

# Checks the licences and sources of crates. Built fast, as it runs for a second.
CARGO_DENY_VERSION := 0.20.2
CARGO_DENY := $(KEPT)/cargo-deny-$(CARGO_DENY_VERSION)/bin/cargo-deny

# Tests at a time. Much of a test's time is waiting for a guest, a server or a thread, so five for two
# processors. With many more a guest without KVM may not boot in two minutes.
WORKERS := $(shell workers=$$((5 * $$(nproc) / 2)); echo $$((workers < 16 ? workers : 16)))
SIDE_BY_SIDE := -n $(WORKERS) --durations=20 --durations-min=10 --dist loadscope --no-loadscope-reorder

# Which of both builds is installed.
BUILT := $(CACHE)/$(if $(LEAN),lean,build).stamp
INSTALL = $(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation

# What a later checkout in the same place need not compile again.
note-sources = $(if $(LEAN),pydataplane/cargo-sources note $(CARGO_BUILD_BUILD_DIR),true)

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

.PHONY: demo
demo: setup ## The main job in a real VM: attach, grow, detach a volume with plain virsh (SHELL_IN=1 keeps it)
	@$(BIN)/python -m tests.demo $(if $(SHELL_IN),--shell)

.PHONY: demo-ceph
demo-ceph: setup ## A VM on a real Ceph: live migration under verified I/O, resize, its host killed
	@$(BIN)/python -m tests.demo.ceph

.PHONY: demo-openstack
demo-openstack: setup ## A volume of real Cinder's in a guest of real Nova's driver: extended, snapshotted, cloned
	@$(BIN)/python -m tests.demo.openstack

.PHONY: demo-kubernetes
demo-kubernetes: kubernetes ## Claims and pods on a real Kubernetes node, built from source the first time
	@$(BIN)/python -m tests.kubernetes

.PHONY: test
test: test-rust setup ## Everything: Rust, Python, real guests, libvirtd, Kubernetes (ARGS="-m 'not kubernetes'" without)
	@$(note-sources)
	@failed=0; $(MAKE) --no-print-directory test-python || failed=1; $(note-sources); exit $$failed

.PHONY: test-rust
test-rust: $(CACHE)/apt.stamp toolchain ## The data plane's own tests, and the inputs of the fuzz targets
	$(call say,cargo test)
	@# Two programs at a time: so many threads of each, together some more than WORKERS.
	@RUST_TEST_THREADS=$$((($(WORKERS) + 1) / 2)) pydataplane/cargo-test $(wordlist 2,9,$(CARGO)) \
		test --workspace --tests --locked --manifest-path $(MANIFEST)
	@# rustdoc removes the program of an example as soon as the runner has ended, so here it is the one that waits.
	@$(CARGO) test --doc --locked --manifest-path $(MANIFEST)

.PHONY: test-python
test-python: setup $(if $(ARGS),,$(CACHE)/apt-kubernetes.stamp) ## The Python tests; with ARGS='tests/unit -k name' some of them
	$(call say,pytest)
	@# Each worker would compile all tests, with their assertions, at the same time: now two do for all.
	@$(if $(ARGS),:,for half in "tests/unit tests/libvirt" "tests --ignore tests/unit --ignore tests/libvirt"; do \
		$(BIN)/python -m pytest -m '' --collect-only -qq $$half >/dev/null 2>&1 & done; wait)
	@$(BIN)/python -m $(if $(ARGS),pytest -m '' $(ARGS),tests.again $(SIDE_BY_SIDE))

.PHONY: fuzz
fuzz: setup ## Each fuzz target for 20 s (FUZZ='ring --seconds 600' for one, longer)
	$(call say,fuzzing)
	@$(BIN)/python -m tests.fuzz $(FUZZ)

.PHONY: nightly
nightly: kubernetes $(CACHE)/apt-bench.stamp $(CACHE)/apt-night.stamp ## What takes hours: long runs, fuzzing, Miri, sanitizers, benchmarks; goes on after a break (STEPS='fuzz miri' for some)
	@$(BIN)/python -m tests.nightly $(STEPS)

.PHONY: test-kubernetes
test-kubernetes: kubernetes ## Of these, the CSI driver on real Kubernetes nodes, built from source the first time
	$(call say,pytest tests/kubernetes)
	@$(BIN)/python -m pytest -m kubernetes tests/kubernetes $(ARGS)

.PHONY: test-e2e
test-e2e: kubernetes ## Kubernetes' own suite for storage drivers (ARGS='thin-xfs' for one run of it)
	$(call say,Kubernetes' storage suite)
	@$(BIN)/python -m tests.kubernetes.e2e $(ARGS)

.PHONY: kubernetes
kubernetes: $(CACHE)/apt-kubernetes.stamp setup
	@$(BIN)/python -m tests.kubernetes.tools >/dev/null

.PHONY: bench
bench: setup $(CACHE)/apt-bench.stamp ## Ours beside Debian's qemu-storage-daemon, with ratios (ARGS='--quick' for a short one)
	@$(BIN)/python -m tests.bench --save $(CACHE)/bench/$$(date +%Y%m%d-%H%M%S).json $(ARGS)
	@$(BIN)/python -m tests.bench.noisy $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.interrupts $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.queues
	@$(BIN)/python -m tests.bench.limits $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.attach
	@$(BIN)/python -m tests.bench.controller
	@$(BIN)/python -m tests.bench.gateway $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.upgrade
	@$(BIN)/python -m tests.bench.idle
	@$(BIN)/python -m tests.bench.pauses
	@$(BIN)/python -m tests.bench.pods $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.ublk $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.rbd $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.snapshots $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.layers $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.many $(filter --quick,$(ARGS))
	@$(BIN)/python -m tests.bench.cold
	@$(BIN)/python -m tests.bench.kv $(filter --quick,$(ARGS))

.PHONY: bench-kubernetes
bench-kubernetes: kubernetes ## How long a claim and a machine's disk take on Kubernetes
	@$(BIN)/python -m tests.kubernetes.bench
	@$(BIN)/python -m tests.kubernetes.kubevirt

.PHONY: lint
lint: lint-code licences ## Formatting, lints, types, licences of crates; nothing is changed

# Of crates, with where they are from. CI has them checked beside what else it does: it is compiled the first time.
.PHONY: licences
licences: toolchain $(CARGO_DENY)
	@$(CARGO_DENY) deny --manifest-path $(MANIFEST) --log-level error --all-features check bans licenses sources

.PHONY: lint-code
lint-code: $(CACHE)/venv.stamp toolchain
	$(call say,lint)
	@$(CARGO) fmt --all --check --manifest-path $(MANIFEST)
	@$(CARGO) clippy --locked --workspace --all-targets --features virtlun-fuzz/libfuzzer --manifest-path $(MANIFEST) -- -D warnings
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.docs links
	@$(BIN)/python -m tests.subjects

.PHONY: docs
docs: $(CACHE)/docs.stamp toolchain ## The site, in build/docs; a warning is an error
	$(call say,docs)
	@rm -rf build/rustdoc
	@RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --locked --no-deps -p blobstore --manifest-path $(MANIFEST) --target-dir build/rustdoc
	@NO_MKDOCS_2_WARNING=1 $(CACHE)/docs-venv/bin/mkdocs build --clean -f docs/mkdocs.yml

.PHONY: release
release: setup ## Source tarball, sdist and wheel of the last commit, with SHA256SUMS, in dist/
	$(call say,release)
	@$(BIN)/python -m tests.release

.PHONY: format
format: $(CACHE)/venv.stamp toolchain ## Format all code
	@$(CARGO) fmt --all --manifest-path $(MANIFEST)
	@$(BIN)/ruff check -q --fix . || true
	@$(BIN)/ruff format .

.PHONY: build
build: $(BUILT) ## The programs, in release profile unless LEAN=1, installed in .venv

.PHONY: setup
setup: $(CACHE)/apt.stamp $(CACHE)/venv.stamp $(BUILT) ## Debian packages, Python environment, programs
	@$(BIN)/python -m tests.guest.image >/dev/null
	@$(BIN)/python -m tests.guest.agent_image >/dev/null
	@$(BIN)/python -m tests.guest.emulator >/dev/null

.PHONY: packages
packages: $(CACHE)/apt.stamp

.PHONY: toolchain
toolchain:
	@command -v cargo >/dev/null || { echo "cargo is not installed: virtlun needs Rust 1.89 or newer, see https://rustup.rs"; exit 1; }
	@# rustup fetches the compiler here where it is not there, before two need it at the same time.
	@cargo --version >/dev/null

$(CARGO_DENY): | toolchain
	$(call say,cargo deny)
	@CARGO_PROFILE_DEV_DEBUG=0 $(CARGO) install --quiet --locked --debug \
		--root $(dir $(@D)) --version $(CARGO_DENY_VERSION) cargo-deny

.PHONY: clean
clean: ## Remove what was built; downloads stay in the cache
	@rm -rf $(VENV) $(CACHE)/*.stamp $(CACHE)/docs-venv build dist *.egg-info pydataplane/target

# $(call apt,PACKAGES): a recipe that installs those that are missing
define apt
	$(call say,Debian packages)
	@mkdir -p $(CACHE)
	@missing=(); for package in $(1); do \
		dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'install ok installed' || missing+=($$package); done; \
	if (( $${#missing[@]} )); then \
		[ $$(id -u) = 0 ] || { echo "run as root, or install: $${missing[*]}"; exit 1; }; \
		apt-get -q update; \
		DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$${missing[@]}"; fi
	@touch $@
endef

$(CACHE)/apt.stamp: Makefile
	$(call apt,$(APT_PACKAGES))

$(CACHE)/apt-bench.stamp: Makefile | $(CACHE)/apt.stamp
	$(call apt,$(BENCH_PACKAGES))

$(CACHE)/apt-night.stamp: Makefile | $(CACHE)/apt.stamp
	$(call apt,$(NIGHT_PACKAGES))

# Python, which knows what they are, comes with the others.
$(CACHE)/apt-kubernetes.stamp: Makefile tests/kubernetes/tools/__init__.py | $(CACHE)/apt.stamp
	$(call apt,$(shell python3 -m tests.kubernetes.tools --apt))

$(CACHE)/venv.stamp: requirements.lock | $(CACHE)/apt.stamp
	$(call say,Python environment)
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed"; exit 1; }
	@python3 -m venv $(VENV)
	@$(BIN)/pip install --require-hashes --disable-pip-version-check -r requirements.lock
	@touch $@

$(CACHE)/docs.stamp: docs/requirements.lock | $(CACHE)/apt.stamp
	$(call say,what the site is built with)
	@python3 -m venv --clear $(CACHE)/docs-venv
	@$(CACHE)/docs-venv/bin/pip install --quiet --require-hashes --disable-pip-version-check -r docs/requirements.lock
	@touch $@

$(BUILT): setup.py pyproject.toml $(RUST_SOURCES) | $(CACHE)/venv.stamp toolchain
	$(call say,programs)
	@rm -f $(CACHE)/build.stamp $(CACHE)/lean.stamp
ifdef LEAN
	@$(CARGO) build --locked --bins --examples --manifest-path $(MANIFEST)
	@VIRTLUN_NO_PROGRAMS=1 $(INSTALL) --quiet -e .
	@install -t $(BIN) $(addprefix pydataplane/target/debug/,virtlun-target virtlun-holder virtlun-bench)
else
	@$(INSTALL) -v -e . 2>&1 | \
		tee $(CACHE)/build.log | { grep --line-buffered -E '^ *(Compiling|Finished|error|warning: unused)' || true; } || \
		{ tail -n 60 $(CACHE)/build.log; exit 1; }
endif
	@touch $@
