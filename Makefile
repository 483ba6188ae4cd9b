# Two commands do everything on a fresh machine: make quickstart, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DETECTRON2_PYTHON := $(HOME)/.venvs/detectron2/bin/python

.PHONY: quickstart test docs lint clean

quickstart: $(VENV)/installed
	$(BIN)/cpvt-det shapes datasets/shapes
	$(BIN)/cpvt-det train --config-file quickstart/deformable_peg.yaml --runner builtin
	@echo "Figures: output/quickstart/results.json. Pictures: output/quickstart/pictures/"

test: $(VENV)/installed-test
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile
	@if ! $(DETECTRON2_PYTHON) -c "import detectron2" 2>/dev/null; then \
		echo "Tests passed without detectron2. Those marked detectron2 did not run: $(DETECTRON2_PYTHON) does not import it."; \
	else \
		$(DETECTRON2_PYTHON) -m pytest -m detectron2 && \
		echo "Tests passed without detectron2, and those marked detectron2 with $(DETECTRON2_PYTHON)."; \
	fi

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q docs output/docs
	@echo "The site: output/docs/index.html"

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info output

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
