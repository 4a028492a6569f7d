# Everything a developer runs, on a machine with python3, a C++ compiler, make and nothing else. `make` lists it.
# The first target that needs an environment makes it, once: .venv and its stamps say what is done already.

# Bytecode is kept, whatever the environment wants (that of many containers does not): without it each process of the tests
# compiles the package, and pytest each of their files, anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
# The release we are tested with. It is installed only if PYTHON has no torch that is new enough; see TORCH_CHECK.
TORCH ?= 2.13.0
OWN_TORCH ?=
DIR ?=
FIGURES ?=
KILLS ?= 500
# A folder of the tests, such as saving: only its tests, of all kinds.
PART ?=
# `make test` is to take 150 s on a machine with two cores; from here on it says so. Slow machines pass as well.
BUDGET_S := 225
SECONDS ?= 60
RANKS ?= 32
SCHEDULES ?= 1000000
SEED ?= $(shell date +%s)
# How deep clang-tidy looks into each function. Its own default, 225000, takes three times as long.
NODES ?= 50000

BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/environment.stamp
BUILT := $(VENV)/built.stamp
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
# A checkout has the fault engine, which its tests need and a wheel does not have (setup.py).
INSTALL_CHECKOUT := FASTPERSIST_FAULT_ENGINE=1 $(PIP_INSTALL) --quiet --no-build-isolation --editable
JOBS := $(shell nproc)
# Two more than there are cores, since most tests wait for a disk or for a process half of the time; memory ends that at 4.
WORKERS := $(shell cores=$$(nproc); echo $$((cores < 2 ? cores + 2 : 4)))

HEADERS := $(sort $(wildcard csrc/*/*.h))
SOURCES := $(sort $(wildcard csrc/*/*.cc))
TEST_SOURCES := $(sort $(wildcard tests/csrc/*.cc tests/abi/*.cc tests/abi/*.h tests/support/*.cc))
WARNED := $(patsubst %.cc,build/check/%.warned,$(SOURCES))
TIDIED := $(patsubst %.cc,build/check/%.tidied,$(SOURCES))

.PHONY: help setup build check docs test test-all test-rest test-long test-oldest test-newest frameworks san abi crash fuzz storm trainers io gpu emulated-gpu demo figures wheel warnings tidy
.DELETE_ON_ERROR:

help:
	@echo 'make demo                  train, save, kill and resume a small GPT, and time it against torch.save'
	@echo 'make test                  the tests that take two minutes together (PART=saving: all tests of that folder)'
	@echo 'make test-all              all tests, but those that take many minutes each'
	@echo 'make test-long             tests of units and programs that take minutes each'
	@echo 'make check                 formatters, linters, type checker, house rules'
	@echo 'make docs                  the documentation, in build/site/, with every link checked'
	@echo 'make setup                 only the environment, in $(VENV)/ (PYTHON=… chooses the interpreter)'
	@echo 'make build                 only the native module (FASTPERSIST_DEBUG=1, FASTPERSIST_SANITIZE=… as in setup.py)'
	@echo 'make test-oldest           the tests with the oldest torch supported, in .venv-oldest/'
	@echo 'make test-newest           the tests with the newest torch that has been tried, in .venv-newest/'
	@echo 'make frameworks            the tests with TorchTitan and Megatron-Core, in .venv-frameworks/ (0.5 GB to download)'
	@echo 'make san                   the C++ tests under ASan and UBSan, then under TSan'
	@echo 'make abi                   what we declare of CUDA and cuFile, against headers of NVIDIA that it downloads'
	@echo 'make crash                 the crash tests with $(KILLS) kills (KILLS=…)'
	@echo 'make fuzz                  $(SCHEDULES) schedules of each simulator, and every fuzzer for $(SECONDS) s (SCHEDULES=…, SECONDS=…, SEED=…)'
	@echo 'make storm                 $(RANKS) ranks that are killed, stopped and late while they save, for $(SECONDS) s (RANKS=…, SECONDS=…, SEED=…)'
	@echo 'make trainers DIR=…        what checkpoints cost inside frameworks (benchmarks/trainers.py --help)'
	@echo 'make io DIR=…              tensors between memory and disk, against fio and DeepNVMe (fastpersist bench io --help)'
	@echo 'make figures DIR=…         measures and draws the figures of README and docs (FIGURES="save load": only these)'
	@echo 'make gpu DIR=…             on a machine with a GPU: builds, tests and measures it (benchmarks/gpu.sh --help)'
	@echo 'make emulated-gpu          the tests for GPUs, over a torch for CUDA (3 GB to download) and doubles of the driver'
	@echo 'make wheel                 a wheel in dist/, tried in a clean environment outside the repository'

# --- environment ---

# Exit with 0 if torch is there, works and is new enough.
TORCH_CHECK := import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7))
# Where installed packages are. Written to a .pth file they become visible in a virtual environment, which
# --system-site-packages does for a system's Python, but not for one that is itself a virtual environment.
PACKAGE_DIRS := import sys; print(*(p for p in sys.path if p.endswith(("site-packages", "dist-packages"))), sep="\n")

# Tools whose version is fixed are installed even if PYTHON has the same: their programs must be in $(BIN).
PRINT_PINNED := sed -n 's/^ *"\([a-z0-9-]*==[^"]*\)",.*/\1/p' pyproject.toml

$(ENVIRONMENT): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'make: $(PYTHON) is missing or older than 3.10; choose another with PYTHON=…'; exit 1; }
	@command -v $(CXX) > /dev/null || { echo 'make: no C++ compiler ($(CXX)); on Debian: apt install g++'; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@if ! $(BIN)/python -c '$(TORCH_CHECK)' 2> /dev/null; then \
	  if test -z '$(OWN_TORCH)' && $(PYTHON) -c '$(TORCH_CHECK)' 2> /dev/null; then \
	    echo 'Using the torch of $(PYTHON).'; \
	    $(PYTHON) -c '$(PACKAGE_DIRS)' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_base.pth"; \
	  else \
	    echo 'Installing torch $(TORCH) from the package index: with its CUDA libraries some 3 GB to download and'; \
	    echo '6 GB on disk, which takes several minutes. (With a torch >= 2.7 in PYTHON=…, that one is used instead.)'; \
	    $(PIP_INSTALL) torch==$(TORCH); \
	  fi; \
	fi
	@$(PRINT_PINNED) | $(PIP_INSTALL) --quiet --force-reinstall --no-deps -r /dev/stdin
	$(INSTALL_CHECKOUT) '.[dev]'
	@touch $@

$(BUILT): $(ENVIRONMENT) setup.py $(SOURCES) $(HEADERS)
	$(INSTALL_CHECKOUT) . --no-deps
	@touch $@

setup: $(BUILT)

# Always runs, since its two switches leave no trace that make could compare; what is up to date is not compiled again.
build: $(ENVIRONMENT)
	$(INSTALL_CHECKOUT) . --no-deps
	@touch $(BUILT)

# --- checks ---

check: $(BUILT)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(SOURCES) $(HEADERS) $(TEST_SOURCES)
	$(MAKE) --no-print-directory -j$(JOBS) warnings tidy
	$(BIN)/pytest tests/test_house.py

warnings: $(WARNED)
tidy: $(TIDIED)

# What csrc needs beside itself; only the binding uses it. -isystem: their warnings are not ours.
FOREIGN_INCLUDES = $(shell $(BIN)/python -c '$(INCLUDE_FLAGS)')
INCLUDE_FLAGS := import pybind11, sysconfig; \
  print("-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include"))

# The compiler's own warnings, optimised, because some need data flow. $(BUILT) is no prerequisite: it is newer than
# any object after each build, and whatever decides a warning is in the sources.
build/check/%.warned: %.cc $(HEADERS) Makefile | $(BUILT)
	@mkdir -p $(@D)
	@echo '$(CXX) -Werror $<'
	@$(CXX) -std=c++20 -O1 -g0 -Wall -Wextra -Wconversion -Werror -Icsrc $(FOREIGN_INCLUDES) -fPIC -c $< -o $@

build/check/%.tidied: %.cc $(HEADERS) .clang-tidy Makefile | $(BUILT)
	@mkdir -p $(@D)
	@echo 'clang-tidy $<'
	@$(BIN)/clang-tidy --quiet --warnings-as-errors='*' $< -- -std=c++20 -Icsrc $(FOREIGN_INCLUDES) \
	  -Xclang -analyzer-config -Xclang max-nodes=$(NODES)
	@touch $@

# --- documents ---

# In an environment of its own, without torch: the site is made from sources. Only the page of the command line is
# written by the program itself, beforehand.
DOCS := build/docs/venv
DOCS_PINNED = $(shell sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
$(DOCS)/environment.stamp: pyproject.toml
	@test -x $(DOCS)/bin/pip || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --disable-pip-version-check --quiet $(DOCS_PINNED)
	@touch $@

# The folder of packages is there before mkdocs looks for it; docs/tools/site_hooks.py fills it later.
docs: $(BUILT) $(DOCS)/environment.stamp
	@mkdir -p build/docs/packages
	$(BIN)/python docs/tools/command_line.py build/docs/command_line.md
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	$(BIN)/python docs/tools/check_links.py build/site

# --- tests ---

PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile
# What `make test` looks through; tests/conftest.py says which tests of it are quick.
QUICK := tests/unit tests/crash/test_kill.py
FOLDERS_OF_PART = $(wildcard tests/$(PART) tests/*/$(PART) tests/*/test_$(PART).py tests/*/*/test_$(PART).py)

test: $(BUILT)
ifneq ($(PART),)
	@test -n '$(FOLDERS_OF_PART)' || \
	  { echo 'make: no tests of $(PART); PART is one of $(sort $(notdir $(patsubst %/,%,$(wildcard tests/*/ tests/unit/*/))))'; exit 1; }
	$(PYTEST) $(FOLDERS_OF_PART)
else
	@started=$$(date +%s); $(PYTEST) $(QUICK) -m 'quick and not long' || exit 1; \
	took=$$(($$(date +%s) - started)); echo "make test: $$took s"; \
	test $$took -le $(BUDGET_S) || echo "make test: more than $(BUDGET_S) s; if this machine is not slow, mark slow tests"
endif

# The rules of the house are tested by `make check`.
test-rest: $(BUILT)
	$(PYTEST) -m 'not quick and not long' --ignore=tests/test_house.py --durations=0 --durations-min=5

# Those of tests/crash and tests/fuzz are run by make crash and make fuzz.
test-long: $(BUILT)
	$(PYTEST) -m long tests/unit tests/programs --timeout=0

test-all:
	$(MAKE) --no-print-directory test
	$(MAKE) --no-print-directory test-rest

test-oldest:
	$(MAKE) --no-print-directory test-all VENV=.venv-oldest TORCH=2.7.0 OWN_TORCH=1

test-newest:
	$(MAKE) --no-print-directory test-all VENV=.venv-newest TORCH=2.15.0 OWN_TORCH=1

# In an environment over $(VENV), since TorchTitan wants other versions of some packages than the other frameworks do.
FRAMEWORKS := .venv-frameworks
frameworks: $(BUILT)
	@test -x $(FRAMEWORKS)/bin/pip || $(PYTHON) -m venv $(FRAMEWORKS)
	@$(BIN)/python -c 'import site; print(*(f"import site; site.addsitedir({p!r})" for p in site.getsitepackages()), sep="\n")' \
	  > "$$($(FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages_below.pth"
	$(FRAMEWORKS)/bin/python -m pip install --disable-pip-version-check --quiet torchtitan==0.3.0 triton megatron-core==0.16.1
	$(FRAMEWORKS)/bin/python -m pytest tests/integrations/test_torchtitan.py tests/integrations/test_megatron.py

san: $(BUILT)
	$(BIN)/pytest tests/csrc --native-variant=address
	$(BIN)/pytest tests/csrc --native-variant=thread

# In an environment of its own: packages of CUDA beside torch's would change what torch loads.
abi:
	@test -x build/abi/venv/bin/pip || $(PYTHON) -m venv build/abi/venv
	build/abi/venv/bin/python tests/abi/check_abi.py build/abi/packages

crash: $(BUILT)
	$(BIN)/pytest tests/crash -m '' --kills=$(KILLS) --timeout=0

SIMULATIONS := $(patsubst %,build/programs-plain/%_simulation_test,request capture)

fuzz: $(BUILT)
	@$(MAKE) --no-print-directory -f tests/csrc/Makefile VARIANT=plain $(SIMULATIONS)
	@set -e; for simulation in $(SIMULATIONS); do \
	  echo "$$simulation --schedules $(SCHEDULES) --seed $(SEED)"; \
	  "$$simulation" --schedules $(SCHEDULES) --seed $(SEED); \
	done
	@set -e; for fuzzer in tests/fuzz/fuzz_*.py; do \
	  echo "$$fuzzer --seconds $(SECONDS) --seed $(SEED)"; \
	  PYTHONPATH=tests $(BIN)/python "$$fuzzer" --seconds $(SECONDS) --seed $(SEED); \
	done

storm: $(BUILT)
	PYTHONPATH=tests $(BIN)/python -m support.rank_storm --ranks $(RANKS) --seconds $(SECONDS) --seed $(SEED)

# --- use ---

demo: $(BUILT)
	$(BIN)/fastpersist demo

trainers: $(BUILT)
	@test -d '$(DIR)' || { echo 'make: trainers DIR=…: an existing directory on the disk to measure'; exit 1; }
	$(BIN)/python benchmarks/trainers.py '$(DIR)'

# Builds for itself, so that one call does all on a machine that has torch and no network.
gpu:
	@test -d '$(DIR)' || { echo 'make: gpu DIR=…: an existing directory on the disk to measure'; exit 1; }
	PYTHON=$(PYTHON) benchmarks/gpu.sh '$(DIR)'

# In an environment of its own. === : a mirror may have a build for CPUs only, which would pass for the same version.
EMULATED := build/emulated-gpu/venv
$(EMULATED)/environment.stamp: pyproject.toml
	$(PYTHON) -m venv $(EMULATED)
	$(EMULATED)/bin/pip install --disable-pip-version-check torch===$(TORCH) 'nvidia-cuda-crt<14'
	$(EMULATED)/bin/pip install --disable-pip-version-check --quiet '.[test]'
	@touch $@

# Not python -m pytest: that imports the source tree, which has no native module, in place of what is installed.
emulated-gpu: $(EMULATED)/environment.stamp
	FASTPERSIST_FAULT_ENGINE=1 $(EMULATED)/bin/pip install --disable-pip-version-check --quiet --no-deps .
	$(EMULATED)/bin/python tests/support/emulated_gpu/run.py --devices 2 $(EMULATED)/bin/pytest -m gpu tests/gpu

io: $(BUILT)
	@test -d '$(DIR)' || { echo 'make: io DIR=…: an existing directory on the disk to measure'; exit 1; }
	$(BIN)/fastpersist bench io '$(DIR)'
	$(BIN)/fastpersist bench io '$(DIR)' --read --random --depth 64 256
	$(BIN)/python benchmarks/deepnvme.py '$(DIR)'

figures: $(BUILT)
	@test -d '$(DIR)' || { echo 'make: figures DIR=…: an existing directory on the disk to measure'; exit 1; }
	$(BIN)/python docs/plots/figures.py measure '$(DIR)' $(FIGURES)

wheel: $(BUILT)
	$(BIN)/python tests/support/check_wheel.py
