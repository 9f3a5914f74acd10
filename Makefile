# make quickstart | test | bench | lint | completions | image | clean.  Each does its own set-up.
include docker/pins.env
SHELL := bash
VENV ?= .venv
PYTHON ?= $(shell command -v python$(PIN_PYTHON_OLDEST) || command -v python3)
export PYTHON
PINS := pyproject.toml docker/install.sh docker/pins.env docker/requirements.txt docker/requirements-cpu.txt
RUN ?=
# tests that are whole runs, which wait as often as they compute: beside the others, when all tests are asked for
RUNS := tests/end_to_end
# of the image: cpu, cuda or rocm; for rocm GFX942 or GFX950
KIND ?= cpu
GFX ?= GFX942
BASE_cpu := $(PIN_IMAGE_CPU)
BASE_cuda := $(PIN_IMAGE_CUDA)
BASE_rocm := $(PIN_IMAGE_ROCM_$(GFX))

.PHONY: quickstart install test bench lint completions image clean
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

test: export PYTHONDONTWRITEBYTECODE :=   # tests start hundreds of processes, which need not compile what another has
test: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check milescli tests bench
ifdef TESTS
	$(VENV)/bin/python -m pytest $(TESTS)
else
	@set -o pipefail; \
	$(VENV)/bin/python -m pytest $(RUNS) 2>&1 | sed -u 's/^/runs | /' & runs=$$!; \
	$(VENV)/bin/python -m pytest $(addprefix --ignore=,$(RUNS)); rest=$$?; \
	wait $$runs && exit $$rest
endif

bench: $(VENV)/.installed-dev
	$(VENV)/bin/python bench/rollout.py
	$(VENV)/bin/python bench/train.py
	$(VENV)/bin/python bench/convert.py

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check milescli tests bench
	$(VENV)/bin/ruff format --check milescli tests bench
	$(VENV)/bin/shellcheck -x docker/install.sh templates/jobs/*.sh
	$(VENV)/bin/hadolint docker/Dockerfile.*

completions: $(VENV)/.installed
	$(VENV)/bin/python -m milescli.commands.completions --write

image:
	docker build -f docker/Dockerfile.$(KIND) --build-arg BASE=$(BASE_$(KIND)) -t miles:$(KIND) .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache dist build
