# Every target does its own set-up: a virtual environment in .venv and, where one is needed, an etcd server. `make help` lists them.

BIN := $(CURDIR)/.venv/bin
export PATH := $(BIN):$(PATH)
# `make test ARGS="-k election"` passes arguments to pytest, `make demo ARGS=...` to the demo, `make bench ARGS=...` to the benchmarks.
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup etcd demo test check test-unit test-process chaos bench wheel clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

setup: ## Make .venv, install gangline into it with everything for development, and find or install etcd
	@.ci/setup dev examples
	@.ci/etcd

demo: ## See a training job lose a rank, a node and the leading scheduler, and go on
	@.ci/setup examples
	@.ci/etcd
	@$(BIN)/python -m gangline.chaos.demo $(ARGS)

test: check ## Run all checks and all tests
	@.ci/etcd
	$(BIN)/python -m pytest $(ARGS)

check: ## Run ruff, mypy and the import contracts
	@.ci/setup dev examples
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-unit: ## Run the tests that start no process
	@.ci/setup dev examples
	$(BIN)/python -m pytest tests/unit tests/tidy $(ARGS)

test-process: ## Run the tests with a real etcd, real schedulers and real agents
	@.ci/setup dev examples
	@.ci/etcd
	$(BIN)/python -m pytest tests/contract tests/process $(ARGS)

chaos: ## Play ten thousand seeds of the simulated cluster: hours; ARGS="--seeds 500 --start 40000" for other ones
	@.ci/setup dev examples
	$(BIN)/gangline chaos sim --seeds 10000 --out .gangline/chaos $(ARGS)

bench: ## Measure
	@.ci/setup dev examples
	@.ci/etcd
	$(BIN)/python -m gangline.benchmarks $(ARGS)

bench-traces: ## Replay traces with published results: make bench-traces ARGS=DIRECTORY
	@.ci/setup dev
	$(BIN)/python -m gangline.benchmarks.traces $(ARGS)

wheel: ## Build the wheel into dist/
	@.ci/setup dev
	$(BIN)/python -m build --wheel

clean: ## Remove everything that can be made again, except a local cluster's state in .gangline
	rm -rf .venv build dist gangline.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
