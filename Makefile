# Outrider needs Python >= 3.11 and make. Every target creates its own .venv first. See README.md.
#   make demo                      answer a prompt through all three services
#   make test                      run the tests that need neither root nor a GPU
# Another package index, for example for the CPU build of torch:
#   make demo EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
#   make demo INDEX_URL=https://my.mirror/simple

# The first interpreter that is recent enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
ifdef INDEX_URL
export PIP_INDEX_URL := $(INDEX_URL)
endif
ifdef EXTRA_INDEX_URL
export PIP_EXTRA_INDEX_URL := $(EXTRA_INDEX_URL)
endif
# The installed versions depend on these files. If one changes, the stamps become stale.
PINS := $(shell cat constraints.txt pyproject.toml setup.py | cksum | tr ' ' -)
SERVE_STAMP := $(VENV)/.serve-$(PINS)
DEV_STAMP := $(VENV)/.dev-$(PINS)

export OMP_NUM_THREADS ?= 1
export TRITON_CACHE_DIR ?= $(CURDIR)/.cache/triton
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start many Python processes. Without stored bytecode, each of them would compile the code again.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -q
STUBS := $(BIN)/python scripts/stubs.py

.PHONY: demo test test-integration test-faults test-law test-schemas test-unit test-kernels test-services test-gpu test-law-gpu test-flashinfer test-multi-gpu lint typecheck imports stubs stubs-check package-test test-compose test-browser test-clients screenshots playground-cost pictures bench setup dev links clean

demo: $(SERVE_STAMP)
	$(BIN)/outrider demo

# Three groups at a time keep two cores busy, because the tests of processes and the law tests often wait. The
# order decides which groups run together: at most two of those that often wait, and short groups last.
GROUPS := test-law test-integration test-unit test-faults test-kernels test-services
test: $(DEV_STAMP)
	@echo '$(GROUPS): three at a time; each prints its output when it ends'
	@$(MAKE) --no-print-directory -k -j3 $(if $(filter output-sync,$(.FEATURES)),--output-sync) $(GROUPS)

# Services as processes. The tests of faults start services of their own. They are a group of their own, which
# can run beside the others.
FAULTS := $(patsubst %,tests/integration/test_%.py,fault_commands garbage many_targets tp_processes)
test-integration: $(DEV_STAMP)
	$(PYTEST) tests/integration $(FAULTS:%=--ignore=%)

test-faults: $(DEV_STAMP)
	$(PYTEST) $(FAULTS)

test-law: $(DEV_STAMP)
	$(PYTEST) tests/law

# 1,000 random JSON schemas on the embedded pair, which takes about six minutes.
test-schemas: $(DEV_STAMP)
	OUTRIDER_SCHEMAS=1000 $(PYTEST) tests/law/test_schema_corpus.py

test-unit: $(DEV_STAMP)
	$(PYTEST) tests/unit

test-kernels: $(DEV_STAMP)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels

# Services in threads of the test process, and real clients.
test-services: $(DEV_STAMP)
	$(PYTEST) tests/rpc tests/contract

# On a GPU host: the laws on the GPU in fp32, compiled kernels, and the embedded pair served with CUDA.
# With pytest-xdist installed: make test-gpu PYTEST_ARGS="-n 8 --dist loadgroup".
test-gpu: test-law-gpu
	$(PYTEST) $(PYTEST_ARGS) -m "gpu and not flashinfer" tests/gpu

test-law-gpu: $(DEV_STAMP)
	OUTRIDER_TEST_DEVICE=cuda $(PYTEST) $(PYTEST_ARGS) tests/law

# The same host with the second attention backend, which is compiled on first use.
test-flashinfer: $(DEV_STAMP)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,flashinfer]'
	$(PYTEST) -m flashinfer tests/gpu

# On a host with at least two GPUs.
test-multi-gpu: $(DEV_STAMP)
	$(PYTEST) -m multi_gpu tests/gpu

# The playground in headless Chromium, which is the system's own (Debian: apt-get install chromium).
BROWSER_EXTRA := $(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,browser]'
test-browser: $(DEV_STAMP)
	$(BROWSER_EXTRA)
	$(PYTEST) tests/browser

# Makes docs/images again, from the embedded pair on the CPU.
screenshots: $(DEV_STAMP)
	$(BROWSER_EXTRA)
	$(BIN)/python scripts/screenshots.py

# The processor time of the page in headless Chromium while answers stream at 300 tokens/s.
playground-cost: $(DEV_STAMP)
	$(BROWSER_EXTRA)
	$(BIN)/python scripts/playground_cost.py

# Makes the pictures of recorded results in docs/images again.
pictures: $(SERVE_STAMP)
	$(BIN)/outrider bench plot --output docs/images --force

# litellm, LangChain, lm-eval and GuideLLM against the embedded pair. The clients have an environment of their
# own, which adds their packages to those of $(VENV).
CLIENTS := $(VENV)/clients
CLIENTS_STAMP := $(CLIENTS)/.installed-$(PINS)-$(shell cksum < tests/clients/requirements.txt | tr ' ' -)
test-clients: $(CLIENTS_STAMP)
	OUTRIDER_PYTHON=$(CURDIR)/$(BIN)/python $(CLIENTS)/bin/python -m pytest -q -c tests/clients/pytest.ini tests/clients

$(CLIENTS_STAMP): $(DEV_STAMP)
	rm -rf $(CLIENTS)
	$(BIN)/python -m venv --without-pip $(CLIENTS)
	$(BIN)/python scripts/share_packages.py $(CLIENTS)
	$(BIN)/python -m pip --python $(CLIENTS)/bin/python install -q --no-deps -r tests/clients/requirements.txt
	@touch $@

bench: $(SERVE_STAMP)
	$(BIN)/outrider bench

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint

typecheck: $(DEV_STAMP) links
	# Not incremental: with a warm cache, mypy 2.4 misses submodules that are imported inside functions.
	$(BIN)/mypy --no-incremental -p outrider

imports: $(DEV_STAMP) links
	PYTHONPATH=.typecheck $(BIN)/lint-imports

stubs: $(DEV_STAMP)
	$(STUBS) write

stubs-check: $(DEV_STAMP)
	$(STUBS) check

# Builds sdist and wheel, compares them, installs only the wheel in a new venv and serves a request from it.
package-test: $(DEV_STAMP)
	$(PYTEST) --timeout 900 tests/packaging

# Needs a Docker engine: DOCKER_HOST, or LOCAL_DOCKER=path of a helper that starts one (see tests/compose).
LOCAL_DOCKER ?= $(wildcard ../shared/tools/local-docker)
test-compose: $(DEV_STAMP)
	LOCAL_DOCKER=$(LOCAL_DOCKER) $(PYTEST) -v --timeout 1800 tests/compose

setup: $(SERVE_STAMP)
dev: $(DEV_STAMP)

$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Outrider needs Python >= 3.11. Name an interpreter: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 -m venv failed. Install your system's python3-venv package." >&2; exit 1; }

$(SERVE_STAMP): | $(BIN)/python
	@echo 'installing packages into $(VENV): this takes a few minutes the first time'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[engine]'
	@rm -f $(VENV)/.serve-* && touch $@

$(DEV_STAMP): | $(BIN)/python
	@echo 'installing packages into $(VENV): this takes a few minutes the first time'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.serve-* $(VENV)/.dev-* && touch $@ $(SERVE_STAMP)

# Type checkers do not see how setup.py maps folders to import names. These links give them the same layout.
links:
	@mkdir -p .typecheck/outrider
	@for folder in kernels shared services train bench; do ln -sfn ../../$$folder .typecheck/outrider/$$folder; done
	@for folder in protos/outrider/*/; do ln -sfn ../../$${folder%/} .typecheck/outrider/$$(basename $$folder); done

clean:
	rm -rf $(VENV) .typecheck .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
