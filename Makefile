# Every target makes its own .venv; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-full browser test-gpu families lint format bench bench-gpu clean

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/phasor train

test: .venv/ready lint browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not slow"

test-full: .venv/ready lint browser
	OMP_NUM_THREADS=1 PHASOR_EXAMPLES=full $(BIN)/python -m pytest -n auto

# The tests of the lab's page need a browser and are skipped where there is none.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		echo "the lab's browser tests are skipped: apt-get install --no-install-recommends chromium"

# The contract tests with CUDA tensors and compiled Triton kernels: position schemes, caches, kernels, generation.
GPU_TESTS := tests/nn tests/kv_cache tests/ops tests/generation tests/training/test_resume_on_gpu.py
test-gpu: .venv/ready
	PHASOR_TEST_DEVICE=cuda $(BIN)/python -m pytest -n 8 -m "not slow" $(GPU_TESTS)

families: .venv/ready
	rm -rf .notes && mkdir .notes
	OMP_NUM_THREADS=1 PHASOR_EXAMPLES=full PHASOR_FAMILY_NOTES=.notes $(BIN)/python -m pytest -n auto tests/models/test_families.py
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
	$(BIN)/python benchmarks/stream.py

# With liger-kernel installed beside; TEXT is a file whose bytes are trained on, random tokens are where there is none.
RESULTS := benchmarks/results
TRAINED := --systems phasor phasor-float8 liger $(if $(TEXT),--text $(TEXT))
bench-gpu: .venv/ready
	$(BIN)/python benchmarks/edges.py
	$(BIN)/python benchmarks/rotary.py --out $(RESULTS)/rotary.json
	$(BIN)/python benchmarks/attention.py --lengths 16384,131072 --out $(RESULTS)/attention.json
	$(BIN)/python benchmarks/sparse.py --lengths 16384,131072,1048576 --flex 16384 --out $(RESULTS)/sparse.json
	$(BIN)/python benchmarks/training_gpu.py $(TRAINED) --curve 120 \
		--out $(RESULTS)/training-gpu.json --plot $(RESULTS)/training-gpu.png
	$(BIN)/python benchmarks/training_gpu.py $(TRAINED) --length 32768 --tokens 32768 \
		--out $(RESULTS)/training-gpu-32k.json
	$(BIN)/python benchmarks/decode_gpu.py --skip variants eager hf --out $(RESULTS)
	$(BIN)/python benchmarks/fused.py --only optimizer float8 --out $(RESULTS)/fused.json
	$(BIN)/python benchmarks/scaling.py --out $(RESULTS)/scaling.json
	$(BIN)/python benchmarks/stream.py --full --out $(RESULTS)/stream.json
	$(BIN)/phasor bench families --json $(RESULTS)/families.json

clean:
	rm -rf .venv build dist
