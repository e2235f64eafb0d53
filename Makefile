# The one entry for people and CI. `make demo` and `make test` need nothing but Python >= 3.11 and a package index.
.DEFAULT_GOAL := help
.NOTPARALLEL: # with -j too: only one apt-get runs at a time, and nothing is done once Debian packages are found missing
.PHONY: help setup demo packages test verify-packages verify affected escape soak chaos oracle check format bench-env bench gpu-imports gpu-smoke clean

BIN := .venv/bin

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: ## .venv from the lock: minutes the first time, nothing after that
	@requirements/install.sh

demo: setup ## a tiny model learns arithmetic by reinforcement learning, within ten minutes on two cores
	$(BIN)/penstock run recipe=arithmetic $(ARGS)

# Much of a whole run is waiting: for processes to start, for what is lost to be noticed. So three test processes share two
# cores, a file at a time. Threads that wait by spinning would keep the cores from those that compute.
WORKERS := 3
SLOWEST := --durations=10 --durations-min=1
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(SLOWEST)
test: packages setup ## a test of each promise with the real parts, and all that need no other process; about 14 minutes on two cores
	$(PYTEST) -m "(not real or promise) and not machines and not gpu and not soak" $(ARGS)

OTHERS := verifiers openenv agents tinker22 tinker30 tinker38
verify: verify-packages setup $(OTHERS:%=.venv-%/.locked) ## after `make test`, the rest: engines x algorithms, deaths, machines, other packages; about 26 minutes
	PENSTOCK_AMOUNT=all $(PYTEST) -m "((real and (not promise or machines)) or hypothesis or histories) and not gpu and not soak" $(ARGS)

SINCE := HEAD
affected: packages setup ## tests that import what changed since the commit SINCE, then all real ones; REAL=no for the first alone
	@files=$$($(BIN)/python -m tests.affected $(SINCE)) && \
	  { [ -z "$$files" ] || $(PYTEST) -m "not real and not gpu and not soak" $$files $(ARGS) || [ $$? = 5 ]; }
	@[ "$(REAL)" = no ] || { $(PYTEST) -m "promise and not machines" && $(MAKE) verify; }

packages: # of Debian, that tests need: first of all, so that one that cannot be had is told before anything runs
	@requirements/debian.sh test $(PYTHON)

verify-packages:
	@requirements/debian.sh verify $(PYTHON)

escape: setup ## attacks on the sandbox that code of models runs in; they fail where it cannot hold, and are never skipped
	$(BIN)/python -m pytest tests/sandbox tests/workers/sandbox $(ARGS)

soak: setup .venv-tinker38/.locked ## before a release: a million random events and more in the store, twenty kills of a run, ten minutes of faults of a server; about an hour
	PENSTOCK_AMOUNT=many $(BIN)/python -m pytest tests/store tests/orchestrator/runs/test_resume.py tests/orchestrator/recovery/test_takeovers.py \
	  tests/workers/trainer/engines/test_layers.py tests/serve/cookbook tests/chaos/test_served_loops.py \
	  tests/planner/test_planned_runs.py \
	  -k "histories or staleness or kills or layers or controller or recipe or would_fit" $(ARGS)
	PENSTOCK_AMOUNT=many $(BIN)/python -m pytest tests -m soak $(ARGS)

LEGS := 10
SEED := 0
chaos: setup ## before a release: runs whose members, links and machines die at random moments from a seed; about an hour, LEGS=3 for less, SEED=100 for others
	rm -f chaos.jsonl
	PENSTOCK_CHAOS=$(LEGS) PENSTOCK_CHAOS_SEED=$(SEED) PENSTOCK_CHAOS_FILE=$(CURDIR)/chaos.jsonl $(BIN)/python -m pytest tests/chaos $(ARGS)
	$(BIN)/python -m tests.chaos.outcome chaos.jsonl

oracle: .venv-oracle/.locked ## the formulas against verl and TRL, in an environment of their own; ARGS="-k gspo" for some
	.venv-oracle/bin/python -m pytest tests/oracle $(ARGS)

check: setup ## ruff, mypy, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## what `make check` asks of layout, done
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-env: setup .venv-trl/.locked .venv-tq/.locked ## the environments of the peers that benchmarks compare with
.venv-%/.locked: requirements/%.lock
	@echo "setup: $(shell grep -c == $<) pinned packages of $< into .venv-$*; takes up to two minutes"
	python3 -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-deps -r $< || \
	  .venv-$*/bin/python -m pip install --quiet --no-deps --extra-index-url https://download.pytorch.org/whl/cpu -r $<
	@touch $@

bench: bench-env ## every benchmark for CPUs, results in benchmarks/results/
	@mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.end_to_end --json benchmarks/results/end_to_end.json $(ARGS)
	$(BIN)/python -m benchmarks.store --json benchmarks/results/store.json $(ARGS)
	$(BIN)/python -m benchmarks.weights --json benchmarks/results/weights.json $(ARGS)
	$(BIN)/python -m benchmarks.agents --json benchmarks/results/agents.json $(ARGS)
	$(BIN)/python -m benchmarks.stragglers --json benchmarks/results/stragglers.json $(ARGS)
	$(BIN)/python -m benchmarks.updates_in_flight --json benchmarks/results/updates_in_flight.json $(ARGS)
	$(BIN)/python -m benchmarks.machines --json benchmarks/results/machines.json $(ARGS)
	$(BIN)/python -m benchmarks.simulated_chain --json benchmarks/results/simulated_chain.json $(ARGS)
	$(BIN)/python -m benchmarks.training --json benchmarks/results/training.json $(ARGS)
	$(BIN)/python -m benchmarks.checkpoint --json benchmarks/results/checkpoint.json $(ARGS)
	$(BIN)/python -m benchmarks.faults --json benchmarks/results/faults.json $(ARGS)
	$(BIN)/python -m benchmarks.controller --json benchmarks/results/controller.json $(ARGS)
	$(BIN)/python -m benchmarks.planner --json benchmarks/results/planner.json $(ARGS)
	$(BIN)/python -m benchmarks.serve --json benchmarks/results/serve.json $(ARGS)
	$(BIN)/python -m benchmarks.ui --json benchmarks/results/ui.json $(ARGS)
	$(BIN)/python -m benchmarks.learning --json benchmarks/results/learning.json $(ARGS)
	$(BIN)/python -m benchmarks.curriculum --json benchmarks/results/curriculum.json $(ARGS)
	$(BIN)/python -m benchmarks.credit --json benchmarks/results/credit.json $(ARGS)
	$(BIN)/python -m benchmarks.learning_environments --json benchmarks/results/learning_environments.json $(ARGS)

# What is not in the lock, as it is nobody's but who asks for it; flash-attention without its kernels.
GPU_EXTRAS := liger-kernel==0.8.5 flash-attn==2.8.3.post2
gpu-imports: .venv-gpu/.locked ## the CUDA builds of requirements/gpu.lock (12 GB) imported, no GPU needed: is all there that is called?
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE .venv-gpu/bin/python -m pip install --quiet --no-deps --no-build-isolation $(GPU_EXTRAS)
	.venv-gpu/bin/python -m benchmarks.gpu.imports

gpu-smoke: setup ## the trainer's first minutes on a GPU, then the ten steps that fail first; writes what was seen into docs/gpu.md
	-$(BIN)/python -m benchmarks.gpu.first_minutes
	$(BIN)/python -m benchmarks.gpu.smoke $(ARGS)

clean: ## all that is made: environments, runs, caches
	rm -rf .venv .venv-trl .venv-tq .venv-oracle .venv-verifiers .venv-openenv .venv-agents .venv-tinker* .venv-gpu runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
