.PHONY: help python system assets demo test test-fast lint lock doctor
PY = $$(bash scripts/env.sh)
export OMP_NUM_THREADS ?= 1

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

python:  ## print the environment's interpreter (creates the environment if needed)
	@bash scripts/env.sh

system:  ## fetch the system libraries and the private software Vulkan driver the simulators need
	@bash scripts/system.sh

demo: system  ## train a small OpenVLA with GRPO in veRL on a real ManiSkill task (about ten minutes on 2 cores)
	@PY=$(PY) && exec $$PY -m rlinf_plugins.cli demo

assets:  ## fetch the tokenizers and the small model some tests use (once; without a network those tests are skipped)
	@bash scripts/test_assets.sh >/dev/null

test: system lint assets  ## lint and the whole test suite, fast tests first
	@PY=$(PY) && $$PY -m pytest -m "not slow and not gpu" && $$PY -m pytest -m "slow and not gpu"

test-fast: assets  ## the fast tests only
	@PY=$(PY) && exec $$PY -m pytest -m "not slow and not gpu" -q

lint:  ## ruff, mypy and the import rules
	@PY=$(PY) && $$PY -m ruff check . && $$PY -m ruff format --check . && MYPYPATH=integrations/verl $$PY -m mypy && $$PY -c "from importlinter.cli import lint_imports_command as run; run()" --no-logo

lock:  ## resolve requirements.lock anew from setup.cfg and requirements.in (needs uv)
	uv pip compile setup.cfg requirements.in --all-extras --universal --python-version 3.11 --generate-hashes \
		--no-annotate --custom-compile-command "make lock" --output-file requirements.lock --quiet

doctor:  ## say what works on this machine and how to fix what does not
	@PY=$(PY) && exec $$PY -m rlinf_plugins.cli doctor
