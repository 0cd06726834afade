# Everything a fresh machine needs: each target sets up .venv by itself.
PYTHON ?= python3
PY := .venv/bin/python
# On a machine without an accelerator: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Its interpreter tests the kernels on a CPU. torch for XPU and ROCm brings a Triton of its own, under the same name.
TRITON := $(if $(findstring xpu,$(TORCH_INDEX))$(findstring rocm,$(TORCH_INDEX)),,'triton==3.7.1; platform_system == "Linux" and platform_machine == "x86_64"')
# Python may write its caches even where the environment forbids it: else each process rewrites the assertions of all
# files of tests anew.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest
# Processes of `make test`, each with one thread: files of tests that run beside each other. One more than two cores, as
# tests also wait.
TEST_PROCESSES ?= 3
# Of the slow tests, many of which start several ranks.
SLOW_PROCESSES ?= 3

.PHONY: help venv demo test test-all test-slurm faults bench bench-registration docs lint clean

help:            ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: .venv/.ready   ## the virtual environment .venv with pinned packages

.venv/.ready: requirements.txt requirements-docs.txt requirements-test.txt
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed, and $(PYTHON) is %d.%d: name another one, such as make PYTHON=python3.11." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv 1>&2
	$(PY) -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements-test.txt $(TRITON) 1>&2
	touch $@

demo: .venv/.ready   ## train on synthetic volumes, register held-out pairs, write Logs/demo/report.html (minutes)
	$(PY) Scripts/demo.py

test: .venv/.ready lint   ## the default tests (minutes on 2 cores, without a GPU)
	CUDA_VISIBLE_DEVICES= $(PYTEST) -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not slow and not slurm and not gpu" tests

test-all: test   ## all tests, also slow ones (an hour); without a GPU, those for a GPU are skipped
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-smoke.txt 1>&2
	$(PYTEST) -q -n $(SLOW_PROCESSES) --dist loadgroup --no-loadscope-reorder -m "slow or slurm or gpu" tests

test-slurm: .venv/.ready   ## jobs on a real Slurm of four nodes on this host (root on Debian; twenty minutes)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-smoke.txt 1>&2
	$(PYTEST) -q -m slurm tests

faults: .venv/.ready   ## every fault against real launches, random kills, goodput (half an hour on 2 cores)
	$(PY) tests/faults/run_matrix.py
	for seed in 1 2 3; do $(PY) tests/faults/chaos.py --kills 20 --seed $$seed || exit 1; done
	$(PY) tests/faults/goodput.py

bench: .venv/.ready   ## benchmarks: operations, the share of a step that is not the network, the cost of safety checks, data, the report (minutes)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-bench.txt 1>&2
	$(PY) tests/bench/bench_ops.py
	$(PY) tests/bench/bench_step.py
	$(PY) tests/bench/bench_runtime.py
	$(PY) tests/bench/bench_data.py
	$(PY) tests/bench/bench_report.py

bench-registration: .venv/.ready   ## registration against ANTs, DIPY, ConvexAdam, VoxelMorph, elastix on real volumes (hours; makes .venv-peers)
	$(PY) tests/bench/bench_registration.py
	$(PY) tests/bench/bench_mouse.py
	$(PY) tests/bench/bench_multimodal.py --subjects test

docs: .venv/.ready   ## the pages of docs/ as a searchable website, in site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo "$(CURDIR)/site/index.html"

lint: .venv/.ready   ## style of the code
	$(PY) -m ruff check --quiet .

clean:           ## remove the virtual environment, the demo's outputs and the site
	rm -rf .venv Logs/demo site
