# make demo   a fresh machine: install, audit every preset, train three small models, write out/report.html
# make test   everything that needs no GPU        make gpu-test, make sanitize, make bench   on a card
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test compile-oldest lint gpu-test sanitize bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: install
	$(BIN)/flamia demo --out out

test: install lint compile-oldest
	$(BIN)/python -m pytest -n 2 --dist loadfile tests

# The kernels, compiled for sm_90a with the oldest Triton that is supported (the suite does it with the newest).
compile-oldest: install
	test -d $(VENV)/triton-3.6.0 || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--target $(VENV)/triton-3.6.0 triton==3.6.0
	PYTHONPATH=$(VENV)/triton-3.6.0 $(BIN)/python -m pytest tests/hopper

lint: install
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

gpu-test:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

# compute-sanitizer over the kernels on small shapes: memcheck, racecheck, initcheck, synccheck.
sanitize:
	PYTHONPATH=src $(PYTHON) scripts/sanitize.py $(TOOLS)

# Beside whatever else is installed, into out/bench.json and .csv; BENCH="--contenders flamia,flash-attn-4 --seconds 140".
bench:
	PYTHONPATH=src $(PYTHON) -m flamia.bench.run $(BENCH)

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache
