# The two commands a newcomer needs:
#   make quickstart   set-up, then the main job: prepare, train three methods, evaluate, report
#   make test         set-up, lint, tests

# The first Python that runs and is one that Farfield supports; set PYTHON=/path/to/python3.12 to choose another.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && echo $$python && break; done)
# megatron-core has no wheel for Python 3.14, so pip compiles its helper, and prints many error lines if it cannot.
CAN_COMPILE := import os, shutil, sys, sysconfig; header = os.path.join(sysconfig.get_path("include"), "Python.h"); \
	sys.exit(sys.version_info >= (3, 14) and not (shutil.which("g++") and os.path.exists(header)))
define check_python
@test -n "$(PYTHON)" && $(PYTHON) -c '$(SUPPORTED)' || \
	{ echo "error: Farfield needs Python 3.11 to 3.14; set PYTHON=/path/to/python3.12" >&2; exit 2; }
@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no ensurepip, which Debian and Ubuntu" \
	"package separately: apt install python3-venv" >&2; exit 2; }
@$(PYTHON) -c '$(CAN_COMPILE)' || { echo "error: megatron-core is compiled on Python 3.14: install g++ and Python's" \
	"headers (apt install g++ python3-dev), or set PYTHON=/path/to/python3.13" >&2; exit 2; }
endef
# Tests start many processes, and each would compile the project again if compiled files were not written.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
# pip compiles one file after the other; compileall does it afterwards on all cores. Each prints dots while it works.
INSTALL_FLAGS := -qq --disable-pip-version-check --no-compile
show_dots = ( while sleep 5; do printf .; done ) & dots=$$!; trap 'kill $$dots; echo' EXIT;
install = $(show_dots) $(1)/bin/python -m pip install $(INSTALL_FLAGS) $(2) && \
	{ $(1)/bin/python -W ignore -m compileall -qq -j 0 $(1)/lib || true; }
# True if an environment already has all packages in allowed versions: a clone is newer than an environment it links to.
is_complete = { test -x $(1)/bin/python && \
	$(1)/bin/python -m pip install -qq --disable-pip-version-check --no-index $(2) 2>/dev/null; }
# Versions that were tested together. CONSTRAINTS= takes the newest versions that the requirements allow.
CONSTRAINTS := constraints.txt
LOCK = $(if $(CONSTRAINTS),-c $(CONSTRAINTS))
# The CUDA build of torch, which the null CUDA device needs (no GPU, no driver), in an environment of its own: 5 GB.
VENV_CUDA := .venv-cuda
COMMA := ,
TORCH := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.txt)

.PHONY: help setup setup-dev quickstart zoo publish-zoo gpu-check slurm launchers setup-cuda test test-cuda test-fast test-with test-newest test-oldest \
	style lint docs site site-version clean

help:
	@sed -n 's/^#   //p' Makefile
	@echo "make zoo          set-up, then the leaderboard: every position method on a text and three tasks, in some hours on two cores"
	@echo "make publish-zoo  the leaderboard's page in docs/results, from the runs in docs/results/zoo"
	@echo "make gpu-check    on a machine with a GPU: kernel tests and benchmarks in under 8 minutes, goals in docs/results/gpu_check.md (docs/gpu.md)"
	@echo "make test-cuda    the CUDA code paths on a null CUDA device: needs no GPU, but the CUDA build of torch (5 GB, once)"
	@echo "make test-newest  tests that use other libraries, with the newest versions of all (7 GB in .venv-newest); test-oldest, test-with"
	@echo "make slurm        as root: Debian's SLURM packages, with which make test also tests jobs over two nodes"
	@echo "make launchers    as root: Debian's sshd, OpenMPI and iproute2, with which make test also tests ssh, mpirun and torchrun"
	@echo "make test-fast    the tests that need no training process, in a little over a minute, for use while you work"
	@echo "make lint         ruff and mypy"
	@echo "make docs         regenerate the generated pages of docs/"
	@echo "make site         the documentation site, in site/: open site/index.html"
	@echo "make clean        remove what the commands above made (not your runs and data)"

$(VENV)/.runtime: requirements.txt $(CONSTRAINTS)
	$(check_python)
	@$(call is_complete,$(VENV),-r requirements.txt) || { \
		echo "setting up $(VENV) with $$($(PYTHON) --version) (once, a minute or more)"; \
		$(PYTHON) -m venv $(VENV) || exit 1; \
		$(call install,$(VENV),$(LOCK) -r requirements.txt); }
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements-dev.txt requirements-eval.txt
	@$(call is_complete,$(VENV),-r requirements-dev.txt) || { \
		echo "installing the test tools (once)"; \
		$(call install,$(VENV),$(LOCK) -r requirements-dev.txt); }
	@touch $@

setup: $(VENV)/.runtime

setup-dev: $(VENV)/.dev

$(VENV_CUDA)/.dev: requirements.txt requirements-dev.txt requirements-eval.txt $(CONSTRAINTS)
	$(check_python)
	@$(call is_complete,$(VENV_CUDA),'torch==$(TORCH)$(COMMA)!=$(TORCH)+cpu' -r requirements-dev.txt) || { \
		echo "setting up $(VENV_CUDA) with the CUDA build of torch (once, 5 GB, two minutes or more)"; \
		$(PYTHON) -m venv $(VENV_CUDA) || exit 1; \
		$(call install,$(VENV_CUDA),'torch==$(TORCH)$(COMMA)!=$(TORCH)+cpu' $(LOCK) -r requirements-dev.txt); }
	@touch $@

setup-cuda: $(VENV_CUDA)/.dev

quickstart: setup
	@$(BIN)/python deepy.py sweep configs/quickstart.yml

zoo: setup
	@$(BIN)/python deepy.py sweep configs/quickstart.yml configs/zoo.yml
	@$(BIN)/python deepy.py report runs/zoo -o runs/zoo/zoo.md >/dev/null && echo "runs/zoo/report.html and runs/zoo/zoo.md contain the results"

publish-zoo: setup
	@$(BIN)/python tools/docs/publish_leaderboard.py

# Uses the environment of `make setup` if it exists, else the system's packages. Installs nothing.
gpu-check:
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) tools/gpu/check.py

style: setup-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

lint: style
	@$(BIN)/mypy

# mypy runs while one process collects the tests; errors of both are shown as they occur.
test: style
	@$(BIN)/mypy --no-error-summary & types=$$!; trap 'kill $$types 2>/dev/null' INT TERM; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal; tests=$$?; \
		wait $$types || { echo "error: mypy failed; its messages are above, at the beginning of the tests" >&2; exit 1; }; \
		exit $$tests

# Tests outside tests/cuda that compute nothing, and that `make test` skips without a GPU or the CUDA build.
NEED_CUDA := tests/distributed/test_hardware.py tests/test_requirements.py::test_triton_version_matches_torch
# pytest itself runs on the null device. A file's tests share what its fixtures made, so each file stays in one process.
test-cuda: setup-cuda
	@OMP_NUM_THREADS=1 $(VENV_CUDA)/bin/python -m megatron.rehearsal.null_device \
		-m pytest tests/cuda $(NEED_CUDA) -n 2 --dist loadfile --durations 5

# Packages with which tests/cluster starts its own SLURM. Installing them starts and configures nothing.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
slurm:
	@command -v apt-get >/dev/null || { echo "error: make slurm installs Debian's packages, and there is no apt-get" >&2; exit 1; }
	@test "$$(id -u)" = 0 || { echo "error: make slurm installs packages and needs root: sudo make slurm" >&2; exit 1; }
	@PATH="$$PATH:/usr/sbin"; command -v slurmctld slurmd srun munged >/dev/null || { \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get -qq update && apt-get -qq install -y --no-install-recommends $(SLURM_PACKAGES) >/dev/null; }

# Packages with which tests/cluster builds two nodes for ssh, mpirun and torchrun. The policy file keeps the machine from
# starting services during the installation: only the tests start an sshd, in namespaces that the machine does not see.
LAUNCHER_PACKAGES := openssh-server openssh-client openmpi-bin iproute2
POLICY := /usr/sbin/policy-rc.d
launchers:
	@command -v apt-get >/dev/null || { echo "error: make launchers installs Debian's packages, and there is no apt-get" >&2; exit 1; }
	@test "$$(id -u)" = 0 || { echo "error: make launchers installs packages and needs root: sudo make launchers" >&2; exit 1; }
	@PATH="$$PATH:/usr/sbin:/sbin"; command -v sshd >/dev/null && command -v ssh >/dev/null && \
		command -v mpirun >/dev/null && command -v ip >/dev/null || { \
		export DEBIAN_FRONTEND=noninteractive; \
		test -e $(POLICY) || { trap 'rm -f $(POLICY)' EXIT; trap 'exit 130' INT TERM HUP; \
			printf '#!/bin/sh\nexit 101\n' >$(POLICY); chmod 755 $(POLICY); }; \
		apt-get -qq update && apt-get -qq install -y --no-install-recommends $(LAUNCHER_PACKAGES) >/dev/null; }

# Finds most mistakes. tests/conftest.py lists the omitted tests.
test-fast: setup-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# Tests that use other libraries, with other versions: make test-with VERSIONS='torch==2.12.0 transformers==5.0.0'.
VENV_WITH := .venv-with
VERSIONS :=
# Triton 3.6 interprets kernels only with NumPy before 2.4.
OLDEST := torch==2.11.0 triton==3.6.0 transformers==4.57.6 numpy==2.3.5
NAMES = $(shell sed -n 's/^\([a-zA-Z][a-zA-Z0-9_.-]*\)[=<>].*/\1/p' requirements.txt requirements-eval.txt requirements-dev.txt)
test-with: setup-dev
	@test -d $(VENV_WITH) || echo "downloading about 3 GB, once, and needing 7 GB of disk in $(VENV_WITH)"
	@echo "setting up $(VENV_WITH) with $(or $(VERSIONS),the newest versions) (some minutes); then 2,000 tests take" \
		"about an hour on two busy cores"
	@$(BIN)/python -m venv $(VENV_WITH)
	@$(call install,$(VENV_WITH),--upgrade --upgrade-strategy eager $(NAMES) $(VERSIONS))
	@$(BIN)/python tools/install/versions.py $(VENV_WITH) --name '$(or $(VERSIONS),newest)' $(RECORD)

test-newest:
	@$(MAKE) --no-print-directory test-with VENV_WITH=.venv-newest

test-oldest:
	@$(MAKE) --no-print-directory test-with VENV_WITH=.venv-oldest VERSIONS='$(OLDEST)'

docs: setup
	@$(BIN)/python tools/docs/make_docs.py

$(VENV)/.docs: $(VENV)/.runtime requirements-docs.txt
	@$(call is_complete,$(VENV),-r requirements-docs.txt) || { echo "installing the tools of the documentation site (once)"; \
		$(call install,$(VENV),-r requirements-docs.txt); } || \
		{ echo "error: the packages of requirements-docs.txt cannot be installed here, and make site needs them" >&2; exit 1; }
	@touch $@

# Publishes the site as VERSION, with the alias LATEST if it is set, in a commit on the branch gh-pages of the remote origin.
site-version: $(VENV)/.docs
	@test -n "$(VERSION)" || { echo "error: VERSION is missing: make site-version VERSION=1.2 LATEST=latest" >&2; exit 2; }
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --push --update-aliases "$(VERSION)" $(LATEST)
	@test -n "$(LATEST)" || git cat-file -e gh-pages:index.html 2>/dev/null || $(BIN)/mike set-default --push "$(VERSION)"
	@test -z "$(LATEST)" || $(BIN)/mike set-default --push "$(LATEST)"

site: $(VENV)/.docs
	@echo "building the site (about 30 s of CPU time)"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "site/index.html is the first page"

clean:
	rm -rf $(VENV) $(VENV_CUDA) .venv-newest .venv-oldest .venv-with site build farfield.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
