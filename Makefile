# Each target sets up what it needs, once: the virtual environment is remade only when its inputs change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.installed
# Each test runs in one thread. A file stays in one process: blocks of a document build on each other.
PARALLEL := --numprocesses 2 --dist loadfile

.PHONY: help demo demo-full test test-slow gpu mutants lint docs measure notebooks dist clean

help:
	@echo "make demo   train a GPT within half of its memory, with a picture in demo/ (a minute and a half once installed)"
	@echo "make demo-full   compare all strategies on two networks, with tables and figures in demo/"
	@echo "make test   run the tests"
	@echo "make test-slow   run those that take long: notebooks, several processes, the largest models"
	@echo "make gpu   check what remat promises on this machine's GPU, and what it costs there (goes on where it stopped)"
	@echo "make mutants   put mistakes into the code and see which the tests notice (hours; goes on where it stopped)"
	@echo "make lint   ruff, mypy, the import rules, and whether the documents say what the results say"
	@echo "make docs   the documentation as a site, in build/site"
	@echo "make notebooks   run the notebooks and keep what they show in them"
	@echo "make dist   wheel and sdist in dist/, each installed into an empty environment and tried there"
	@echo "make measure   make the results again that are older than the code they measure (hours; goes on where it stopped)"

$(DONE): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(DONE)

demo: $(DONE)
	$(BIN)/python -m examples.within_half --out demo

demo-full: $(DONE)
	$(BIN)/remat compare examples.demo:language --out demo/language
	$(BIN)/remat compare examples.demo:images --out demo/images

test: $(DONE)
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not slow and not fake_device"
	$(BIN)/python -m pytest -q $(PARALLEL) -m "not slow" tests/fake_device

test-slow: $(DONE)
	$(BIN)/python -m pytest -q $(PARALLEL) -m "slow and not fake_device"
	$(BIN)/python -m pytest -q $(PARALLEL) --dist load -m slow tests/fake_device

gpu: $(DONE)
	$(BIN)/python -m pytest -q -m "cuda or fake_device" tests/check/test_cuda.py tests/fake_device
	$(BIN)/python -m remat.check --out benchmarks/results

mutants: $(DONE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[mutants]'
	$(BIN)/python -m benchmarks.mutants

docs: $(DONE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

lint: $(DONE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m benchmarks.text --check
	$(BIN)/lint-imports

measure: $(DONE)
	$(BIN)/python -m benchmarks --older

notebooks: $(DONE)
	$(BIN)/python notebooks/execute.py

# What is built is tried where nothing else is: by a new environment, from a folder that is not this one.
dist: $(DONE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dist]'
	rm -rf dist build/tried
	$(BIN)/python -m build --outdir dist . >/dev/null
	for built in dist/*.tar.gz dist/*.whl; do \
		rm -rf build/tried && $(PYTHON) -m venv build/tried && \
		build/tried/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch $$built && \
		(cd build/tried && bin/python ../../tests/installed.py) && \
		build/tried/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
			"$$built[all]" transformers && \
		(cd build/tried && bin/python ../../tests/installed.py) || exit 1; \
	done

clean:
	rm -rf $(VENV)
