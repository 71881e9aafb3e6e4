# `make` or `make help` lists the targets. A target's help is the text after `##` on its line.

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# Long benchmarks and demos take options:  make bench ARGS="--rows 1000000"
ARGS   ?=

# Spark must start its workers with the same Python as the driver, or they lack the packages.
export PYSPARK_PYTHON        := $(CURDIR)/$(PY)
export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(PY)

# Some environments forbid Python to keep what it compiled. Here hundreds of processes load the same modules.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo kafka test test-fast test-slow test-cluster simulate search chaos matrix lint types format docs bench bench-quick rivals clean check-java

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install midstream with everything its development needs

demo: check-java $(STAMP) ## set up, then run the main demo; no server to start
	@$(PY) -m examples.fraud $(ARGS)

# One process has the session that Spark's tests share; the other one runs those that start drivers of their own, and
# seeds of the simulation.
test: check-java test-fast ## set up, then run all tests, Spark included (under 8 minutes on 2 cores)
	@$(PY) -m pytest -m "(spark or long) and not slow and not cluster" --numprocesses 2 --dist loadgroup tests $(ARGS)

test-slow: check-java $(STAMP) ## what `make test` leaves out: a cluster, all pages on Spark, more kills
	@$(PY) -m pytest -m "slow and not cluster" --numprocesses 2 --dist loadgroup tests $(ARGS)

test-cluster: check-java $(STAMP) ## what `make test-slow` leaves out: executors that come, go and die while state moves; benchmarks
	@$(PY) -m pytest -m cluster --numprocesses 2 --dist loadgroup tests $(ARGS)

test-fast: $(STAMP) ## only the tests that need no Spark (under 1 minute; no Java needed)
	@$(PY) -m pytest -m "not spark and not long and not slow" --ignore tests/spark --numprocesses 2 $(ARGS)

matrix: check-java ## the fast tests, and some on Spark, with other versions of Python and PySpark (an hour the first time)
	@scripts/matrix $(ARGS)

kafka: check-java $(STAMP) ## fetch what the tests, the example and the benchmark with Kafka need (27 MB)
	@$(PY) -m examples.kafka.jars

lint: $(STAMP) ## style, formatting and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

types: $(STAMP) ## types only
	@$(PY) -m mypy

format: $(STAMP) ## rewrite the code in the project's format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

docs: $(VENV)/.docs ## the site, from pages and docstrings, into build/site; a broken link fails
	@$(PY) -m sphinx -q -W --keep-going -c docs/site . build/site && echo "The site: build/site/index.html"

simulate: $(STAMP) ## thousands of random flows, faults and seeds on the local runtime; then `make search`
	@$(PY) -m tests.simulation.run $(ARGS)
	@$(MAKE) search ARGS=

# Hypothesis marks its tests itself. What it finds is tried first when it searches again, from .hypothesis.
search: $(STAMP) ## search for new examples of all properties; `make test` always tries the same few
	@$(PY) -m pytest -m "hypothesis and not spark" --ignore tests/spark --hypothesis-profile searching --timeout 0 \
	    --numprocesses 2 $(ARGS)

chaos: check-java $(STAMP) ## kill workers, executors and drivers of real jobs at random moments, against the oracle
	@$(PY) -m tests.chaos.run $(ARGS)
	@$(PY) -m tests.chaos.changes $(ARGS)
	@$(PY) -m tests.chaos.plans $(ARGS)

bench: check-java $(STAMP) ## the benchmarks, in full; each ends with a line of JSON
	@$(PY) -m benchmarks.pipeline $(ARGS)
	@$(PY) -m benchmarks.latency $(ARGS)
	@$(PY) -m benchmarks.memory $(ARGS)
	@$(PY) -m benchmarks.keyed $(ARGS)
	@$(PY) -m benchmarks.observing $(ARGS)
	@$(PY) -m benchmarks.state_growth $(ARGS)
	@$(PY) -m benchmarks.fries $(ARGS)
	@$(PY) -m benchmarks.effect $(ARGS)
	@$(PY) -m benchmarks.delay $(ARGS)
	@$(PY) -m benchmarks.surge $(ARGS)
	@$(PY) -m benchmarks.migration $(ARGS)
	@$(PY) -m benchmarks.square_wave $(ARGS)
	@$(PY) -m benchmarks.rescale $(ARGS)
	@$(PY) -m benchmarks.assignment_overhead $(ARGS)
	@$(PY) -m benchmarks.plan_changes $(ARGS)
	@$(PY) -m benchmarks.tuning $(ARGS)
	@$(PY) -m benchmarks.elasticity $(ARGS)
	@$(PY) -m benchmarks.txn $(ARGS)
	@$(PY) -m benchmarks.ledger $(ARGS)
	@$(PY) -m benchmarks.applications $(ARGS)
	@$(PY) -m benchmarks.nexmark $(ARGS)
	@$(PY) -m benchmarks.kafka $(ARGS)

bench-quick: check-java $(STAMP) ## the benchmarks, small
	@$(PY) -m benchmarks.pipeline --quick $(ARGS)
	@$(PY) -m benchmarks.latency --quick $(ARGS)
	@$(PY) -m benchmarks.memory --quick $(ARGS)
	@$(PY) -m benchmarks.keyed --quick $(ARGS)
	@$(PY) -m benchmarks.observing --quick $(ARGS)
	@$(PY) -m benchmarks.state_growth --quick $(ARGS)
	@$(PY) -m benchmarks.fries --quick $(ARGS)
	@$(PY) -m benchmarks.effect --quick $(ARGS)
	@$(PY) -m benchmarks.delay --quick $(ARGS)
	@$(PY) -m benchmarks.surge --quick $(ARGS)
	@$(PY) -m benchmarks.migration --quick $(ARGS)
	@$(PY) -m benchmarks.square_wave --quick $(ARGS)
	@$(PY) -m benchmarks.rescale --quick $(ARGS)
	@$(PY) -m benchmarks.assignment_overhead --quick $(ARGS)
	@$(PY) -m benchmarks.plan_changes --quick $(ARGS)
	@$(PY) -m benchmarks.tuning --quick $(ARGS)
	@$(PY) -m benchmarks.elasticity --quick $(ARGS)
	@$(PY) -m benchmarks.txn --quick $(ARGS)
	@$(PY) -m benchmarks.ledger --quick $(ARGS)
	@$(PY) -m benchmarks.applications --quick $(ARGS)
	@$(PY) -m benchmarks.nexmark --quick $(ARGS)
	@$(PY) -m benchmarks.kafka --quick $(ARGS)

rivals: $(STAMP) ## install PyFlink, for the benchmarks that compare with it, into build/rivals (850 MB)
	@$(PY) -m benchmarks.rivals.install

clean: ## remove caches, builds and what Spark leaves behind (.venv stays)
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis artifacts derby.log metastore_db spark-warehouse
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

check-java: ## say whether Spark will find a Java it can use
	@sh scripts/check-java

# Redone when what is to be installed changes. An environment whose Python has gone or is too old is made anew.
$(STAMP): pyproject.toml requirements-dev.txt
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    python=$$(sh scripts/find-python) && echo "Creating $(VENV) with $$python" && $$python -m venv --clear $(VENV); }
	@echo "Installing into $(VENV); the first time this takes a few minutes, most of them for Spark"
	@{ $(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt && \
	   $(PY) -m pip install --quiet --disable-pip-version-check --editable '.[spark,fsspec,txn,delta,iceberg,server,notebook,examples,dev]'; } || { \
	    echo; \
	    echo "The installation failed; pip says why above. It needs a network, or a package index or folder that pip"; \
	    echo "is configured for. Running the same command again goes on from here."; \
	    exit 1; }
	@touch $@

$(VENV)/.docs: $(STAMP) requirements-docs.txt
	@$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements-docs.txt
	@touch $@
