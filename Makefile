# make quickstart | test | bench | lint | completions | clean.  Each does its own set-up.
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
export PYTHON
PINS := pyproject.toml docker/install.sh docker/requirements-cpu.txt
RUN ?=

.PHONY: quickstart install test bench lint completions clean
.DEFAULT_GOAL := quickstart

quickstart: $(VENV)/.installed
	$(VENV)/bin/miles launch --recipe quickstart $(RUN)

install: $(VENV)/.installed

$(VENV)/.installed: $(PINS)
	docker/install.sh $(VENV)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed docker/requirements-dev.txt
	$(VENV)/bin/pip install -q --disable-pip-version-check -r docker/requirements-dev.txt
	@touch $@

test: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check milescli tests bench
	$(VENV)/bin/python -m pytest $(TESTS)

bench: $(VENV)/.installed-dev
	$(VENV)/bin/python bench/rollout.py
	$(VENV)/bin/python bench/train.py
	$(VENV)/bin/python bench/convert.py

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check milescli tests bench
	$(VENV)/bin/ruff format --check milescli tests bench

completions: $(VENV)/.installed
	$(VENV)/bin/python -m milescli.commands.completions --write

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache dist build
