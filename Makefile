# The two commands of the README are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Without it every process of a test that starts, and there are hundreds, would compile all that it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types layers pytest ordeals proof proof-full docs release clean

$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	tests/install_system_packages.sh
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,hf,hivemind,rl,tensorboard]' --editable lab
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/shoal testnet --out runs/demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# trio ships its own types, but a dependency of libp2p installs outdated stubs that would hide them.
.typing/trio: $(STAMP)
	ln -sfn "$$($(BIN)/python -c 'import os, trio; print(os.path.dirname(trio.__file__))')" .typing/trio

types: .typing/trio
	$(BIN)/mypy -p shoal.protocol -p shoal.swarm -p shoal.collectives -p shoal.node -p shoal.cli -p shoal.testnet -p shoal.lab

layers: $(STAMP)
	$(BIN)/lint-imports

pytest: $(STAMP)
	$(BIN)/python -m pytest tests -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -m "not long"

# Real processes under every kind of trouble, and the wheel in an environment of its own: beyond the time of `make test`.
ordeals: $(STAMP) $(BIN)/llama-server
	$(BIN)/python -m pytest tests -n 3 --dist loadfile --no-loadscope-reorder -m long -o faulthandler_timeout=1800

$(BIN)/llama-server: tests/install_llama_cpp.sh | $(STAMP)
	tests/install_llama_cpp.sh $@

# Every claim in figures, by its command; one that holds of the code as it is, is not proven again. Hours.
proof: $(STAMP)
	$(BIN)/python -m shoal.lab.proof

# The same with those that take hours each: before a release.
proof-full: $(STAMP)
	$(BIN)/python -m shoal.lab.proof --full

docs: $(STAMP)
	$(BIN)/mkdocs build --quiet

# Built from the last commit into dist/ and tried, nothing published: docs/releasing.md. PYTHONS: paths of interpreters.
release: $(STAMP)
	$(BIN)/python -m shoal.lab.release $(PYTHONS:%=--python %)

# The types are checked beside the tests, which often wait.
test: lint layers
	$(MAKE) --jobs=2 types pytest

clean:
	rm -rf .venv runs build dist *.egg-info
