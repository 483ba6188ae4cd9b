# Two commands do everything on a fresh machine: make quickstart, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A worker that dies is replaced twice, then the run ends.
# Files are begun in the order of tests/conftest.py, which bounds the memory of a worker.
WORKERS := --numprocesses auto --dist loadfile --no-loadscope-reorder --max-worker-restart 2
DETECTRON2_PYTHON := $(HOME)/.venvs/detectron2/bin/python
# Its tests are in files that contain the word; tests/conftest.py holds that. To collect all files takes longer than some of them.
DETECTRON2_TESTS = $(sort $(shell grep -rl --include='test_*.py' detectron2 tests))

OLDEST := .venv-oldest
# The loop of a contributor: parts, contracts and losses by value; no processes, no commands.
QUICK := $(patsubst %,tests/%.py,whole/test_architecture layers/test_attention ops/test_nms layers/test_norm \
	position/test_peg test_structures losses/test_losses whole/test_seams test_config)

.PHONY: quickstart test check matrix docs lint clean

quickstart: $(VENV)/installed
	$(BIN)/cpvt-det shapes datasets/shapes
	$(BIN)/cpvt-det train --config-file quickstart/deformable_peg.yaml --runner builtin
	@echo "Figures: output/quickstart/results.json. Pictures: output/quickstart/pictures/"

test: $(VENV)/installed-test
	$(BIN)/python -m pytest $(WORKERS)
	@browser="$$($(BIN)/python tests/browser.py)"; \
	if ! $(DETECTRON2_PYTHON) -c "import detectron2" 2>/dev/null; then \
		echo "Tests passed without detectron2. Those marked detectron2 did not run: $(DETECTRON2_PYTHON) does not import it.$$browser"; \
	else \
		$(DETECTRON2_PYTHON) -m pytest -m detectron2 $(WORKERS) $(DETECTRON2_TESTS) && \
		echo "Tests passed without detectron2, and those marked detectron2 with $(DETECTRON2_PYTHON).$$browser"; \
	fi

check: lint
	$(BIN)/python -m pytest -q $(WORKERS) $(QUICK)

# The oldest torch of setup.py, then the newest that pip takes.
matrix: $(OLDEST)/installed-test $(VENV)/installed-test
	$(BIN)/python tests/matrix.py $(OLDEST)/bin/python $(BIN)/python
	@echo "The table: benchmarks/results/matrix.md"

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q docs output/docs
	@echo "The site: output/docs/index.html"

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info output

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-docs: setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[docs]"
	touch $@

$(VENV)/installed-test: setup.py | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[test]"
	touch $@

$(OLDEST)/installed-test: setup.py
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check torch==2.9.0 torchvision==0.24.0 -e ".[test]"
	touch $@
