# Needs a Python >= 3.11 (with venv), make and a package index; everything else goes into .venv.
# Other Pythons: make PYTHON=python3.12 ...   Other tests: make test PYTEST_ARGS="-k packing -x"

# The newest Python here, because the newest JAX runs on Python >= 3.12 only.
PYTHON ?= $(or $(shell $(call first-usable,$(NEWEST))),python3)
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
# What may differ from JAX to JAX is tested whole on the oldest, too: texts, profiles, traced programs.
DIFFERS := tests/hlo tests/profile tests/proof tests/report tests/step
UV := uv==0.13.8
# A file's tests share what they compiled, so one worker runs all of them; long files begin. Three
# workers for two cores, where there are tests of several processes, which mostly wait.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Neither a newer pyright nor a newer site generator is news to somebody who runs what is locked.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export NO_MKDOCS_2_WARNING := 1
# Containers often set it: every process that a test starts would compile all of jaxcoll anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test test-fast test-oldest test-pages durations lint format docs bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: .venv/.synced ## prepare .venv from uv.lock, and nothing else

demo: venv ## train on real data over 8 simulated devices and show what was sent
	.venv/bin/jaxcoll demo $(DEMO_ARGS)

test: venv ## the test suite
	.venv/bin/python -m pytest -n 3 $(BY_FILE) -m "not product" $(PYTEST_ARGS)

test-fast: venv ## an answer in a minute and a half: one case of every test, no slow or multi-process ones
	.venv/bin/python -m pytest -n 2 $(BY_FILE) --few 1 -m "not slow and not processes and not product" $(PYTEST_ARGS)

test-pages: venv ## what users are shown: pages, examples, notebooks, the site, the wheel, demo and bench
	.venv/bin/python -m pytest -n 3 $(BY_FILE) -m product $(PYTEST_ARGS)

test-oldest: ## on the oldest Python and JAX what differs there, and one case of every other test
	@oldest=$$($(call first-usable,$(OLDEST))); \
	if [ -z "$$oldest" ]; then \
	  echo "test-oldest: no Python 3.11 (with venv) on this machine, so the oldest JAX was not tested."; \
	else \
	  $(MAKE) --no-print-directory PYTHON="$$oldest" .venv-oldest/.synced && \
	  .venv-oldest/bin/python -c 'import sys, jax; print("test-oldest: JAX", jax.__version__, "on Python", sys.version.split()[0])' && \
	  .venv-oldest/bin/python -m pytest -n 3 $(BY_FILE) -m "not product" --few 1 $(DIFFERS:%=--whole %) $(PYTEST_ARGS); \
	fi

durations: venv ## every test, and write tests/durations.txt, by which files take turns
	.venv/bin/python -m pytest -n 3 $(BY_FILE) --record-durations $(PYTEST_ARGS)

lint: venv ## ruff, pyright and import-linter
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright
	.venv/bin/lint-imports --no-logo

format: venv ## let ruff put the code in order
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

docs: venv ## build the site into site/, warnings are errors
	.venv/bin/mkdocs build --strict

bench: venv ## all-reduces beside JAX's own, on the devices here; benchmarks/README.md has more
	.venv/bin/jaxcoll bench $(BENCH_ARGS)

clean: ## remove everything that make has made
	rm -rf .venv .venv-oldest site dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip installs what uv.lock pins, so this machine's own pip settings (index, mirror,
# certificates) are respected. A stamp makes the second time free. `ensurepip` is for an
# environment that `uv run` made, which has no pip.
.venv/.synced .venv-oldest/.synced: %/.synced: pyproject.toml uv.lock | %/bin/python
	@$*/bin/python -m pip --version >/dev/null 2>&1 || $*/bin/python -m ensurepip
	$*/bin/python -m pip install --quiet $(UV)
	$*/bin/uv export --quiet --frozen --all-extras --no-extra gpu-aot --no-extra tpu-aot \
	  --no-default-groups --no-emit-project --python $*/bin/python --output-file $*/requirements.txt
	$*/bin/python -m pip install --quiet --no-deps --requirement $*/requirements.txt
	$*/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.venv/bin/python .venv-oldest/bin/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxcoll needs Python 3.11 or newer, and '$(PYTHON)' is not; name one: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv --clear $*

# Every candidate is tried: pyenv's commands may be on PATH and fail.
PYENV = $(shell ls -d "$$(pyenv root 2>/dev/null)"/versions/$(1)/bin/python3 2>/dev/null | sort -r)
OLDEST = python3.11 $(call PYENV,3.11.*)
NEWEST = python3.15 python3.14 python3.13 python3.12 $(call PYENV,3.1[2-5].*) $(OLDEST) python3
first-usable = for python in $(1); do \
	"$$python" -c 'import sys, venv, ensurepip; sys.version_info < (3, 11) and sys.exit(1); print(sys.executable)' 2>/dev/null && break; \
	done
