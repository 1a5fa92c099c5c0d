# Every target is one line over the command line: `make install`, then .venv/bin/toolkit --help.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install image run quick test test-all tests/image tests/packages tests/frameworks tests/bytecode test-nightly test-fresh-machine test-cluster test-gpu fuzz property lint docs figures recording golden sandbox-up sandbox-down sandbox-status submit-slurm demo-k8s bench bench-train-loop bench-checkpoint bench-language bench-slurm bench-asking bench-kubernetes bench-executor bench-recovery bench-goodput bench-telemetry bench-supervisor chaos faults notebooks release clean

PYTHON ?= python3
BIN := .venv/bin
SANDBOX := slurm/sandbox/sandbox
JOB ?= jobs/digits.yaml
PROFILE ?= slurm
WORKLOAD ?= PyTorchJob
NODES ?= 4
ARGS ?=
BASE ?=
MINUTES ?= 60
MOMENTS ?= 100
MOMENT ?=
SEED ?=
COUNT ?=
RUN ?=
# With it, as in the images of many languages, each of the tests' processes compiles all it imports.
unexport PYTHONDONTWRITEBYTECODE

help:  ## Show the targets
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 18

install: .venv/installed  ## Make .venv with everything pinned

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make install PYTHON=python3.11")'
	@echo "installing into .venv (about a minute)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[kubernetes,submitit,train,docs,dev]'
	@touch $@

image: install  ## Build localhost/train:latest from train/; BASE=IMAGE for another base than Debian
	@$(BIN)/python train/build-image $(BASE)

run: install  ## Train JOB on this machine
	@$(BIN)/toolkit run $(JOB) $(ARGS)

submit-slurm: install  ## Submit JOB to PROFILE and follow it; to the sandbox where it is up
	@eval "$$($(SANDBOX) env 2>/dev/null)"; $(BIN)/toolkit submit $(JOB) --to $(PROFILE) --follow $(ARGS)

demo-k8s: install  ## Train JOB as a WORKLOAD of Kubernetes, on a cluster of processes of this machine
	@tests/fakes/kubernetes/with.sh tests/fakes/kubernetes/demo.sh $(JOB) $(WORKLOAD) $(ARGS)

sandbox-up: install  ## Start a real Slurm cluster of NODES nodes on this machine
	@$(SANDBOX) up --nodes $(NODES)

sandbox-down:  ## End it
	@$(SANDBOX) down

sandbox-status:  ## Show its nodes
	@$(SANDBOX) status

lint: install  ## Check style, spelling and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell && $(BIN)/mypy $(if $(CI),--cache-dir=/dev/null)

quick: lint  ## Check style and types, and run the tests that need no root, no image, no Slurm and nothing outside of .venv
	@CUDA_VISIBLE_DEVICES= $(BIN)/pytest -n auto --dist worksteal -m "not slow and not nightly and not slurm" \
	  $(addprefix tests/unit/,job profile planning rendering supervisor lint) $(ARGS)

test:  ## Install what the tests need and run those that each change must pass
	@$(MAKE) --no-print-directory -j4 tests/image tests/frameworks tests/bytecode lint
	@CUDA_VISIBLE_DEVICES= $(BIN)/pytest -n 4 --dist worksteal $(ARGS)

test-all:  ## Run all tests: also the slow ones (chaos, versions of Slurm, images)
	@$(MAKE) --no-print-directory -j4 tests/image tests/frameworks tests/bytecode lint
	@tests/peers.sh
	@CUDA_VISIBLE_DEVICES= $(BIN)/pytest --hypothesis-profile=search -m "not nightly" -n 3 --dist worksteal $(ARGS)

# Before the tests: they would all wait for it, and leave it no processor.
tests/image: install tests/packages
	@$(BIN)/python train/build-image >/dev/null 2>&1 || echo "the image of train/ could not be built; its tests will say why" >&2

tests/packages:
	@tests/packages.sh

tests/frameworks: install
	@tests/frameworks.sh

# Once, before each process of pytest would compile all tests.
tests/bytecode: install
	@$(BIN)/pytest --collect-only -q >/dev/null 2>&1 || true

test-nightly: tests/image  ## Run the tests that take too long for each change
	@CUDA_VISIBLE_DEVICES= $(BIN)/pytest --hypothesis-profile=search -m nightly -n 2 -o timeout=14400 $(ARGS)

test-fresh-machine:  ## Run the gate on a new Debian in a folder, made with debootstrap; needs root and 30 GB
	@tests/fresh-machine.sh .ci/run

test-gpu: install  ## Run the tests that need a GPU, as many as there are GPUs for
	@$(BIN)/pytest -m gpu tests/train $(ARGS)

fuzz: install  ## Try odd inputs for MINUTES, all seven fuzzers side by side
	@TOOLKIT_FUZZ_MINUTES=$(MINUTES) $(BIN)/pytest tests/security/test_fuzz.py -n 7 -o timeout=0 $(ARGS)

property: install  ## Train COUNT (2000) drawn models from SEED on: each as plain torch does, or refused by name
	@CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m tests.train.promise $(or $(SEED),$$RANDOM) $(or $(COUNT),2000)

chaos: install  ## Hit runs with faults drawn from SEED: MOMENTS in their first seconds, then MINUTES of any; MOMENT=k or RUN=k repeats one
	@$(if $(RUN),,$(BIN)/python -m tests.system.chaos.first_seconds --moments $(MOMENTS) $(if $(SEED),--seed $(SEED)) $(if $(MOMENT),--moment $(MOMENT)))
	@$(if $(MOMENT),,$(BIN)/python -m tests.system.chaos.play --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(RUN),--run $(RUN)) $(ARGS))

faults: install  ## Run each fault once and write the table of docs/how-to/failures.md; ARGS="--only WORD" for a part
	@$(BIN)/python -m tests.system.chaos.fault_table $(ARGS)

test-cluster: install  ## Run the tests that hold on a real Kubernetes cluster, on that of KUBECONFIG
	@TOOLKIT_TEST_CLUSTER=1 $(BIN)/pytest tests/unit/kubernetes -m any_cluster -n 2 --dist worksteal -o timeout=1800 $(ARGS)

docs: install  ## Build the site of the documentation: site/latest/index.html
	@$(BIN)/python -m website.build $(ARGS)

figures: install  ## Measure and draw the figures of docs/learn; ARGS names some, or --draw
	@$(BIN)/pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[bench]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.figures $(ARGS)

recording: install  ## Record docs/recording.svg at a real terminal
	@$(PYTHON) -m venv .cache/recorder && .cache/recorder/bin/pip install -qq --disable-pip-version-check termtosvg==1.1.0 setuptools==75.8.0
	@script -qec '.cache/recorder/bin/termtosvg docs/recording.svg -c docs/recording.sh -g 104x30 -m 80 -M 4000 -t window_frame' /dev/null

golden: install  ## Write the rendered examples again
	@$(BIN)/python -m tests.support.golden

bench: install  ## Measure beside TorchX
	@$(BIN)/python -m benchmarks.render

bench-train-loop: install  ## Measure the training loop beside bare ones, Lightning and Accelerate
	@$(BIN)/pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[bench]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.train_loop $(ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.ddp_step $(ARGS)
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.replicas $(ARGS)

bench-checkpoint: install  ## Measure how long a checkpoint stops the training
	@$(BIN)/python -m benchmarks.checkpoint $(ARGS)

bench-slurm: install  ## Measure submitting and planning beside scripts by hand, on a sandbox
	@$(BIN)/python -m benchmarks.slurm $(ARGS)

bench-asking: install  ## Measure asking for 10,000 runs, on a sandbox
	@$(BIN)/python -m benchmarks.asking $(ARGS)

bench-kubernetes: install  ## Measure rendering beside TorchX, and waiting for 1,000 runs
	@$(BIN)/python -m benchmarks.kubernetes $(ARGS)

bench-executor: install  ## Measure calling a function on all ranks beside submitit, on a sandbox
	@$(BIN)/python -m benchmarks.executor $(ARGS)

bench-recovery: install  ## Measure from each fault to the first new step, beside a script by hand, on a sandbox
	@$(BIN)/python -m benchmarks.recovery $(ARGS)

bench-goodput: install  ## Measure goodput under a fixed schedule of faults, beside a script by hand and Lightning, on a sandbox
	@$(BIN)/pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[bench]'
	@$(BIN)/python -m benchmarks.goodput $(ARGS)

bench-telemetry: install  ## Measure what metrics and watchdog cost per step, and comparing 10,000 ranks
	@$(BIN)/python -m benchmarks.telemetry $(ARGS)

notebooks: install  ## Run the notebooks again and keep what they show; on the sandbox where it is up
	@eval "$$($(SANDBOX) env 2>/dev/null)"; $(BIN)/jupyter execute --inplace notebooks/quickstart.ipynb notebooks/sweep.ipynb
	@tests/fakes/kubernetes/with.sh $(BIN)/jupyter execute --inplace notebooks/kubernetes.ipynb

bench-supervisor: install  ## Measure the look of the supervisor at 1,000 nodes, and the start of torchrun, on a sandbox
	@$(BIN)/python -m benchmarks.supervisor $(ARGS)

bench-language: install  ## Measure tokens/s and MFU beside a bare loop; on a GPU if there is one
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.language_model $(ARGS)

release: install  ## Build wheel and sdist twice, compare and check them, and write SBOM and checksums: all in dist/
	@$(BIN)/pip install -qq --disable-pip-version-check --no-compile -c constraints.txt -e '.[release]'
	@distribution/release.sh

clean: sandbox-down  ## Remove what was made here, runs excepted
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist site .cache/site
