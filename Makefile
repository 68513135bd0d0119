# make report    the quick tier of the case matrix; the page is reports/latest/index.html
# make test      ruff, the tests, the quick tier, and its gate
# make lint      ruff, and the types
# make test-long the tests that make test leaves out: they take long, and others test the most of it; 100 minutes, 2 cores
# make gate      the quick tier, and whether any case got worse than in the baseline of this device
# make bench     speed, every figure beside a ceiling of the same run, outputs judged; reports/bench/index.html
# make mutants   332 wrong kernels and modules against the quick tier, which has to find each; on a CPU
# make mutants-harness  347 wrong changes of the harness and the reference: each must fail a test; 10 minutes, 2 cores
# make soak      a part of the quick tier that has every feature, over 200 fresh seeds: no kernel may fail
# make train     a small transformer learns under every recipe, every stage of every step judged; reports/train/index.html
# make conformance  docs/conformance.md: the quantizers of other libraries, each in an environment of its own
# make docs      the documentation as a site, with an API reference: reports/docs/index.html
#
# Each sets itself up in .venv the first time. DEVICE=cuda runs on a GPU. PY=python3 uses that interpreter as it is, where
# it already has everything (a GPU container, say). TORCH_INDEX= takes torch from pip's own indexes, without a look at the
# index of torch's CPU builds.

DEVICE ?= cpu
ifeq ($(DEVICE),cuda)
BASELINE ?= reports/baselines/sm_90.json
else
BASELINE ?= reports/baselines/host.json
# Two workers that need the same kernel would wait for one compiler.
BUILD = $(PY) -m narrowgauge build
endif
PYTHON ?= python3
VENV := .venv
# A process that compiles the modules it imports takes a fifth of a core-second longer, and tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(origin PY),undefined)
PY := $(VENV)/bin/python
READY := $(VENV)/ready-$(DEVICE)
endif

ifeq ($(DEVICE),cuda)
# Pick cuda12 for a CUDA 12 driver.
CUDA ?= cuda13
INSTALL := -e '.[test,$(CUDA)]'
DOCS := -e '.[docs]'
else
export TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
INSTALL := -c constraints-cpu.txt -e '.[test]'
DOCS := -c constraints-cpu.txt -e '.[docs]'
# pip loads and unpacks on one core, and the kernels need nothing that pip installs. BUILD waits for a kernel in work.
COMPILE = @nice $(PYTHON) -c 'from narrowgauge.native.runtime import host, sources as s; [*map(host.library, s.CPU_SOURCES)]' \
		< /dev/null > /dev/null 2>&1 &
# torch alone is from torch's index, all else from pip's own: with --extra-index-url pip would take any package from the
# index with the higher version. Few tries: an index that cannot be reached must not hold up what works without it.
define CPU_TORCH
@$(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps --retries 1 --timeout 15 \
		--index-url $(TORCH_INDEX) -c constraints-cpu.txt torch \
		|| echo "No CPU build of torch from $(TORCH_INDEX): pip installs torch from its own indexes." \
			"PyPI's build for Linux on x86-64 is for CUDA and takes 5 GB with its libraries." >&2
endef
endif

.PHONY: report test test-long lint ruff gate bench mutants mutants-harness soak train conformance docs clean

report: $(READY)
	$(BUILD)
	$(PY) -m narrowgauge run --tier quick --device $(DEVICE)

test: ruff
	$(BUILD)
	$(PY) -m pytest tests -n auto -m "not long" --ng-device $(DEVICE)
	@# 925 cases took 42 core-seconds under pytest, 30 by this command.
	$(PY) -m narrowgauge run --tier quick --device $(DEVICE)
ifeq ($(DEVICE),cpu)
	$(PY) -m narrowgauge gate --baseline $(BASELINE)
endif

test-long: $(READY)
	$(PY) -m pytest tests -n auto -m long --ng-device $(DEVICE)

lint: ruff
	$(PY) -m mypy

# What of it takes no time.
ruff: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

gate: $(READY)
	$(PY) -m narrowgauge run --tier quick --device $(DEVICE) || test $$? -eq 1 # a failure may be an accepted one
	$(PY) -m narrowgauge gate --baseline $(BASELINE)

bench: $(READY)
	$(PY) -m narrowgauge bench --device $(DEVICE)

mutants: $(READY)
	$(PY) -m narrowgauge mutants

mutants-harness: $(READY)
	$(PY) -m tests.mutants.run

soak: $(READY)
	$(PY) -m narrowgauge soak --device $(DEVICE)

conformance: $(READY)
	$(PY) docs/conformance.py

train: $(READY)
	$(PY) -m narrowgauge train --device $(DEVICE)

# The root of the repository is the source folder, so that links between pages work there too. -E: no page of an older build.
docs: $(READY) $(if $(READY),$(VENV)/ready-docs)
	$(PY) -m sphinx -W --keep-going -E -q -j auto -d reports/docs/.doctrees -c docs . reports/docs
	@echo "reports/docs/index.html"

$(VENV)/ready-docs: pyproject.toml $(READY)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(DOCS)
	touch $@

$(VENV)/ready-$(DEVICE): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "narrowgauge needs Python 3.11 or later; $(PYTHON) is not: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(COMPILE)
	$(if $(TORCH_INDEX),$(CPU_TORCH))
	$(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check $(INSTALL)
	@# pip compiles on one core; packages hold a few files for other versions of Python, which this cannot
	@$(VENV)/bin/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis reports/latest reports/docs
