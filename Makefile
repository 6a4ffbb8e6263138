# Two commands matter: `make run` answers a prompt with the real default model, `make test` passes the tests.
# Both set up everything they need in .venv and take seconds once that is done.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ifeq ($(PYTHON),)
$(error Octavo needs Python 3.11 or later on the PATH)
endif
VENV   := .venv
PY     := $(VENV)/bin/python
NATIVE := CMakeLists.txt pyproject.toml $(shell find native/src -type f 2>/dev/null)
# The extension's build; pyproject.toml names it too. One folder for all environments of a tree: build for one at a time.
BUILD  := build/extension
export PATH := $(abspath $(VENV)/bin):$(PATH)
PROMPT ?= What is the capital of France?
# Test processes. A file's tests stay in one, in order, so that they share their fixtures.
JOBS   ?= 2

.PHONY: run test soak lint bench native-test clean
.NOTPARALLEL:
run: $(VENV)/.octavo
	@$(VENV)/bin/octavo run "$(PROMPT)"

test: $(VENV)/.test $(VENV)/.models native-test
	@$(PY) -m pytest -q -m "not soak" -n $(JOBS) --dist loadfile

# Long checks. The log is for docs/soak/, where dated results are kept.
soak: $(VENV)/.test $(VENV)/.models
	@mkdir -p build
	@$(PY) -m pytest -m soak --timeout 7200 -rA --tb=short -q --durations=0 > build/soak.log 2>&1; status=$$?; \
	  grep -E "^(PASSED|FAILED|ERROR)|Measures|passed|failed|s call" build/soak.log; exit $$status

lint: $(VENV)/.lint
	@$(VENV)/bin/ruff check src tests scripts
	@$(VENV)/bin/mypy

bench: $(VENV)/.octavo
	@$(VENV)/bin/octavo bench offline --model smollm2 --prompt 512 --output 128 --batch 1 --repeat 3
	@$(VENV)/bin/octavo bench offline --model smollm2 --prompt 128 --output 64 --batch 16 --repeat 3

# The kernel tests: plain executables.
native-test: $(BUILD)/.tests
	@ctest --test-dir $(BUILD) --output-on-failure -j 2 > $(BUILD)/test.log || (cat $(BUILD)/test.log; false)
	@tail -n 3 $(BUILD)/test.log

$(VENV)/bin/python:
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q --upgrade pip

# Octavo itself with the extras $(1).
define install
	@echo "building octavo"
	@$(PY) -m pip install -q "scikit-build-core>=1.1" "nanobind>=3.1,<4"
	@command -v cmake > /dev/null || $(PY) -m pip install -q cmake
	@command -v ninja > /dev/null || command -v make > /dev/null || $(PY) -m pip install -q ninja
	@$(PY) -m pip install -q --no-build-isolation -e ".$(1)"
	@$(PY) -m compileall -q src
endef

$(VENV)/.octavo: $(VENV)/bin/python $(NATIVE)
	$(call install,)
	@touch $@

# All at once: the extras behind the rest would be a second build.
$(VENV)/.test: $(VENV)/bin/python $(NATIVE)
	$(call install,[test])
	@touch $(VENV)/.octavo $@

$(VENV)/.lint: $(VENV)/.test
	@$(PY) -m pip install -q --no-build-isolation -e ".[lint]"
	@touch $@

# The real models of the tests; later runs find them in the model cache and download nothing.
$(VENV)/.models: $(VENV)/.octavo
	@$(VENV)/bin/octavo pull smollm2
	@$(VENV)/bin/octavo pull gemma3-270m
	@touch $@

# What was installed from this folder may have outlived it.
$(BUILD)/CMakeCache.txt: | $(VENV)/.octavo
	@test -f $@ || { rm -f $(VENV)/.octavo; $(MAKE) --no-print-directory $(VENV)/.octavo; }

# In the extension's build: the library that they link is compiled there already.
$(BUILD)/.tests: $(VENV)/.octavo $(NATIVE) $(wildcard native/tests/*.cc) | $(BUILD)/CMakeCache.txt
	@cmake $(BUILD) -DOCTAVO_NATIVE_TESTS=ON > $(BUILD)/configure.log
	@cmake --build $(BUILD) --target native_tests -j 2 > $(BUILD)/build.log || (cat $(BUILD)/build.log; false)
	@touch $@

clean:
	rm -rf build $(VENV)
