# make demo    sets up .venv and runs ten nodes with five models, alone and together
# make test    sets up .venv and runs the linter, the type checker and all tests
# make quick   the same without the slow tests
# make cpu     sets up .venv with torch for CPUs only (several GB less on Linux):
#              make cpu TORCH_ARGS="--index-url <index of torch's CPU wheels>"
#
# PYTHON=python3.12      the interpreter for .venv (3.11 or newer)
# PIP_ARGS="..."         options of every pip install, such as a mirror
# ARGS="..."             more options of `heterofleet simulate` or of pytest

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
TORCH_ARGS ?=
ARGS ?=

# Few samples a node and half of them for testing: where joining pays.
DEMO := -c data.test-fraction=0.5

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS)

.PHONY: demo test quick cpu setup clean

demo: $(VENV)/.app
	$(BIN)/heterofleet simulate --nodes 10 $(DEMO) $(ARGS)

# The slow tests, whole simulations and deployments that wait for much of their time, run beside the others; their output
# comes last. pytest's exit code 5 says that ARGS chose no test of one kind.
test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	@log=$$(mktemp); $(BIN)/python -m pytest -m slow $(ARGS) > $$log 2>&1 & slow=$$!; trap 'kill $$slow' INT TERM; \
	$(BIN)/python -m pytest -m "not slow" $(ARGS); quick=$$?; \
	wait $$slow; slow=$$?; cat $$log; rm -f $$log; \
	if [ $$quick = 5 ]; then exit $$slow; elif [ $$slow = 5 ]; then exit $$quick; else exit $$((quick + slow)); fi

quick: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

setup: $(VENV)/.app

cpu:
	@test -n "$(TORCH_ARGS)" || { echo 'make cpu needs TORCH_ARGS="--index-url <index of torch CPU wheels>"; see README.md'; exit 2; }
	$(MAKE) setup

# The stamps hold the requirements that were installed, so that a second call does nothing.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# torch first, from wherever TORCH_ARGS says; the other requirements then find it installed.
$(VENV)/.app: requirements.txt pyproject.toml | $(VENV)/bin/python
	$(if $(TORCH_ARGS),grep -E '^(torch|torchvision)[<>=]' requirements.txt > $(VENV)/torch.txt && $(PIP) $(TORCH_ARGS) -r $(VENV)/torch.txt)
	$(PIP) -r requirements.txt
	touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.app
	$(PIP) -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
