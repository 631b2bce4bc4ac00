# Every target makes its own .venv; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-full families lint format bench clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/phasor train

test: .venv/ready lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow"

test-full: .venv/ready lint
	OMP_NUM_THREADS=1 PHASOR_EXAMPLES=full $(BIN)/python -m pytest -n auto

families: .venv/ready
	rm -rf .notes && mkdir .notes
	OMP_NUM_THREADS=1 PHASOR_EXAMPLES=full PHASOR_FAMILY_NOTES=.notes $(BIN)/python -m pytest -n auto tests/test_families.py
	$(BIN)/python tests/families/table.py .notes
	rm -rf .notes

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/ready
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/loading.py

clean:
	rm -rf .venv build dist
