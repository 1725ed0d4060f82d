# Everything from a fresh clone: `make train` trains, `make test` tests. Nothing else by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The versions that are installed; constraints-oldest.txt has the oldest torch and transformers that are supported.
CONSTRAINTS ?= constraints.txt
TRAINS := $(VENV)/.trains
STAMP := $(VENV)/.installed

.PHONY: bench docs site lab train test suite test-environments test-agents test-tinker test-audit test-trl test-kernels test-ray test-hosts test-extras test-full test-vllm lint format control base-model shapes-model constraints dist test-dist clean help
help:
	@echo "make train | test | test-full (what it leaves out) | test-vllm (against a real one) | dist | test-dist (a release, tried in an empty environment) | test-environments (others', each in a venv of its own) | test-agents (agents and programs that evaluate, likewise) | test-tinker (the Tinker SDK and its cookbook's recipes, in one of its own) | test-audit (the audit of two releases of TRL, in two) | test-trl TRL=CHECKOUT (TRL's own tests of GRPO and RLOO against policygrad.trl) | test-kernels (Triton's, in its interpreter) | test-ray (on a Ray of this machine, in one of its own) | test-hosts (several hosts in network namespaces, as root) | test-extras (every extra alone, in one of its own) | lint | format | docs | site | lab | control | bench | base-model | shapes-model | clean"

PIP := $(BIN)/python -m pip install --disable-pip-version-check -c $(CONSTRAINTS)

# Training needs torch, transformers and what they need; the tests, the documentation and the extras that they try come on top.
# pip is not quiet: it downloads for a minute or more, and every package is a line.
$(TRAINS): pyproject.toml $(CONSTRAINTS)
	@echo "Installing policygrad and what training needs into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(STAMP): $(TRAINS)
	@echo "Installing what the tests and the documentation need as well"
	$(PIP) -e '.[dev]'
	@touch $@

train: $(TRAINS)
	$(BIN)/policygrad train $(ARGS)

# Side by side: the type checker is one process, and much of the suite waits for processes of its own.
test: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 lint suite
	@echo "Passed. make test-full adds kills at random moments, every algorithm and architecture in every kind of run, and engines' faults."

# CPU seconds that the fast tier should take; half as much again is a failure (scripts/test_costs.py).
BUDGET := 1200

# Tests start many processes: without what Python keeps of its compiled modules each of them compiles the package anew.
suite test-full: export PYTHONDONTWRITEBYTECODE :=
suite: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not full and not hosts" --budget $(BUDGET) $(ARGS)

test-full: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m full $(ARGS)
	@$(MAKE) --no-print-directory test-kernels

test-vllm: $(STAMP)
	@test -x "$$POLICYGRAD_VLLM/bin/vllm" || { echo "POLICYGRAD_VLLM must name a virtual environment with bin/vllm (0.32)"; exit 2; }
	$(BIN)/python -m pytest tests/samplers/test_vllm.py tests/samplers/test_vllm_lora.py tests/samplers/test_vllm_pictures.py tests/samplers/test_nccl_transfer_gpus.py $(ARGS)

# Others' packages want other versions of much that is pinned, and of one another: each has a virtual environment of its own.
OTHERS := .environments
REAL_mcp := mcp-server-time==2026.10.19 mcp-server-git==2026.10.19
REAL_openenv := openenv-core==0.3.0
REAL_textarena := textarena==0.7.4
REAL_verifiers := verifiers==0.4.0
# of the extra llama-cpp: an engine for a cluster
REAL_ray := httpx==0.28.1 gguf==0.19.0

$(OTHERS)/%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHERS)/$*
	grep -E '^(torch|transformers|tokenizers|safetensors|reasoning_gym|pytest|ray)==' constraints.txt > $(OTHERS)/$*/constraints.txt
	$(OTHERS)/$*/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHERS)/$*/constraints.txt -e '.[$*]' $(REAL_$*) pytest
	@touch $@

test-environments: $(OTHERS)/mcp/.installed $(OTHERS)/openenv/.installed $(OTHERS)/textarena/.installed $(OTHERS)/verifiers/.installed
	for name in mcp openenv textarena verifiers; do \
		$(OTHERS)/$$name/bin/python -m pytest -m environments tests/environments/test_real_$$name.py $(ARGS) || exit 1; done

# Agents are programs: their environments, which tests/agents.toml lists, have neither policygrad nor torch. Programs that evaluate
# talk to the same API; lm-eval has torch, since its own type of models is what the answers are compared with.
EVALUATES_inspect-ai := inspect-ai==0.3.285 openai==3.57.0 anthropic==2.14.0
EVALUATES_lm-eval := 'lm-eval[hf,api]==0.4.13' torch==2.13.0 transformers==5.23.0 datasets==5.2.0

$(OTHERS)/evaluates/%/.installed: Makefile
	$(PYTHON) -m venv $(OTHERS)/evaluates/$*
	$(OTHERS)/evaluates/$*/bin/python -m pip install --quiet --disable-pip-version-check $(EVALUATES_$*)
	@touch $@

test-agents: $(STAMP) $(OTHERS)/evaluates/inspect-ai/.installed $(OTHERS)/evaluates/lm-eval/.installed
	$(BIN)/python scripts/agents_matrix.py install --folder $(OTHERS)/agents
	POLICYGRAD_AGENTS=$(OTHERS)/agents POLICYGRAD_EVALUATES=$(OTHERS)/evaluates $(BIN)/python -m pytest -m agents tests/environments/test_agents_elsewhere.py tests/environments/test_agents_matrix.py tests/proxy/test_evaluation_programs.py $(ARGS)

# The cookbook's one dependency that the index does not have is for models of other kinds than these.
$(OTHERS)/tinker/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHERS)/tinker
	grep -E '^(torch|transformers|tokenizers|safetensors|reasoning_gym|pytest|peft)==' constraints.txt > $(OTHERS)/tinker/constraints.txt
	$(OTHERS)/tinker/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHERS)/tinker/constraints.txt -e '.[serve,lora]' tinker==0.38.0 $(COOKBOOK) pytest pytest-timeout
	$(OTHERS)/tinker/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tinker-cookbook==0.6.1
	@touch $@
COOKBOOK := aiohttp blobfile chz datasets pillow pyrage termcolor tiktoken math-verify pylatexenc

test-tinker: $(OTHERS)/tinker/.installed
	$(OTHERS)/tinker/bin/python -m pytest tests/serve tests/docs/test_serve_page.py $(ARGS)

# Two releases of TRL: the newest, and the last with huggingface/trl#6024.
REAL_audit-1.16.0 := trl==1.16.0
REAL_audit-1.9.0 := trl==1.9.0 requests

$(OTHERS)/audit%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHERS)/audit$*
	grep -E '^(torch|transformers|tokenizers|safetensors|reasoning_gym|pytest|hypothesis)==' constraints.txt > $(OTHERS)/audit$*/constraints.txt
	$(OTHERS)/audit$*/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHERS)/audit$*/constraints.txt -e . $(REAL_audit$*) pytest pytest-timeout hypothesis
	@touch $@

test-audit: $(OTHERS)/audit-1.16.0/.installed $(OTHERS)/audit-1.9.0/.installed
	for release in 1.16.0 1.9.0; do \
		$(OTHERS)/audit-$$release/bin/python -m pytest tests/audit/test_audit_trl.py $(ARGS) || exit 1; done

# TRL's own tests of GRPO and RLOO, unchanged, with our classes in TRL's place. Beside the suite's packages they want jmespath,
# and dashscope for the vocabulary whose ids they write out. They run in the folder of the fixtures; a checkout stays as it is.
TRL_FILES ?= test_grpo_trainer.py test_rloo_trainer.py
TRL_NEEDS := jmespath==1.1.0 dashscope==2.0.2
FIXTURES := $(OTHERS)/trl/fixtures

$(OTHERS)/trl/.installed: Makefile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OTHERS)/trl/packages $(TRL_NEEDS)
	@touch $@

test-trl: export PYTHONPATH := $(CURDIR)/src:$(CURDIR)/tests:$(CURDIR)/$(OTHERS)/trl/packages
test-trl: export OMP_NUM_THREADS := 1
test-trl: $(STAMP) $(OTHERS)/trl/.installed
	@test -d "$(TRL)/tests" || { echo "TRL must name a checkout of github.com/huggingface/trl: make test-trl TRL=../trl"; exit 2; }
	$(BIN)/python tests/trl_suite/fixtures.py $(FIXTURES) --trl $(TRL)
	cd $(FIXTURES) && PYTHONDONTWRITEBYTECODE=1 $(CURDIR)/$(BIN)/python -m pytest -p trl_suite.plugin -p no:cacheprovider -n auto --dist worksteal \
		--timeout 1200 --trl-table trl-tests $(addprefix $(abspath $(TRL))/tests/,$(TRL_FILES)) $(ARGS)

# Triton is some 600 MB, and a CPU's torch has none: it lies beside the suite's packages.
$(OTHERS)/kernels/.installed: Makefile
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OTHERS)/kernels/packages triton==3.6.0
	@touch $@

test-kernels: export PYTHONPATH := $(CURDIR)/$(OTHERS)/kernels/packages
test-kernels: $(STAMP) $(OTHERS)/kernels/.installed
	$(BIN)/python -m pytest tests/samplers/test_decode_kernels.py

test-ray: $(OTHERS)/ray/.installed
	$(OTHERS)/ray/bin/python -m pytest -m ray tests/cluster $(ARGS)

# Several hosts in namespaces of this machine: Linux, as root. Where they are not allowed, every test is skipped and says why.
# Those of a Ray cluster need the environment of test-ray: make .environments/ray/.installed
test-hosts: export PYTHONDONTWRITEBYTECODE :=
test-hosts: $(STAMP)
	$(BIN)/python -m pytest -m hosts -rs tests/hosts $(ARGS)

# Every extra alone: some gigabytes come and go in .extras; ARGS='--only lora' for one.
test-extras: $(STAMP)
	$(BIN)/python scripts/check_extras.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy
	$(BIN)/python scripts/make_docs.py --check

docs: $(STAMP)
	$(BIN)/python scripts/make_docs.py

site: $(STAMP)
	$(BIN)/python scripts/make_site.py

lab: $(STAMP)
	$(BIN)/python scripts/make_lab.py
	$(BIN)/python scripts/screenshots.py lab

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

control: $(STAMP)
	$(BIN)/python scripts/measure_control.py $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/versus_trl.py $(ARGS)
	$(BIN)/python benchmarks/speed.py $(ARGS)

base-model: $(STAMP)
	$(BIN)/python scripts/make_base_model.py

shapes-model: $(STAMP)
	$(BIN)/python scripts/make_shapes_model.py

constraints: $(STAMP)
	@(head -2 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable) > .constraints.new && mv .constraints.new constraints.txt

# A release: make test-dist builds and tries it; a tag vX.Y.Z publishes it (.github/workflows/release.yml).
RELEASE := .environments/release
$(RELEASE)/.installed: Makefile
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	@touch $@

dist: $(RELEASE)/.installed
	rm -rf build/dist
	$(RELEASE)/bin/python -m build --outdir build/dist .
	$(RELEASE)/bin/twine check --strict build/dist/*

PYTHONS ?= $(PYTHON)
test-dist: dist
	$(RELEASE)/bin/python scripts/check_wheel.py build/dist --python $(PYTHONS) --constraints $(CONSTRAINTS) $(if $(TAG),--tag $(TAG))

clean:
	rm -rf $(VENV) $(OTHERS) .extras build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
