# Every target makes its own .venv; PYTHON chooses the interpreter it is made with.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo docs docs-en docs-zh test test-full browser test-gpu families lint format bench bench-gpu clean

# constraints.txt names the torch that tests run with; `make test CONSTRAINTS=` takes the newest that phasor supports.
CONSTRAINTS ?= constraints.txt

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS)) -e '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/phasor train

# Processes of tests keep their bytecode, whatever the environment says: each would compile all of phasor again.
test test-full test-gpu families: export PYTHONDONTWRITEBYTECODE =

# A file's tests run in one process, so that what they share (trained models, servers, compiled code) is made once. Files
# run in their order: the last ones are doctests, which are short, so that no process waits for another at the end.
test: .venv/ready lint browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow"

test-full: .venv/ready lint browser
	OMP_NUM_THREADS=1 PHASOR_EXAMPLES=full $(BIN)/python -m pytest -n auto

# The tests of the lab's page need a browser and are skipped where there is none.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		echo "the lab's browser tests are skipped: apt-get install --no-install-recommends chromium"

# The contract tests with CUDA tensors and compiled Triton kernels: position schemes, caches, kernels, generation.
GPU_TESTS := tests/nn tests/kv_cache tests/ops tests/generation tests/test_compiled_blocks.py tests/training/test_resume_on_gpu.py
test-gpu: .venv/ready
	PHASOR_TEST_DEVICE=cuda $(BIN)/python -m pytest -n 8 -m "not slow" $(GPU_TESTS)

families: .venv/ready
	rm -rf .venv/families && mkdir .venv/families
	OMP_NUM_THREADS=1 PHASOR_EXAMPLES=full PHASOR_FAMILY_NOTES=.venv/families $(BIN)/python -m pytest -n auto tests/models/test_families.py
	$(BIN)/python tests/families/table.py .venv/families

# Both languages at once; a warning is an error. The pages are in build/docs/en and build/docs/zh.
SITE := $(BIN)/python -m sphinx -W -n --keep-going --quiet -b html
docs: .venv/ready
	$(MAKE) -j2 --output-sync=target docs-en docs-zh

docs-en: .venv/ready
	$(SITE) -d build/docs/pages/en docs build/docs/en

docs-zh: .venv/ready
	$(SITE) -d build/docs/pages/zh -c docs -D language=zh_CN docs/zh build/docs/zh

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/ready
	$(BIN)/phasor bench backward --device cpu
	$(BIN)/phasor bench train-cpu
	$(BIN)/phasor bench decode-cpu
	$(BIN)/phasor bench loading
	$(BIN)/phasor bench stream --device cpu

# With liger-kernel installed beside; TEXT is a file whose bytes are trained on, random tokens are where there is none.
RESULTS := benchmarks/results
TRAIN := $(BIN)/phasor bench train-gpu --set systems=phasor,phasor-float8,liger $(if $(TEXT),--set text=$(TEXT))
bench-gpu: .venv/ready
	$(BIN)/python benchmarks/edges.py
	$(BIN)/phasor bench rotary-kernels --json $(RESULTS)/rotary.json
	$(BIN)/phasor bench attention-kernels --set lengths=16384,131072 --json $(RESULTS)/attention.json
	$(BIN)/phasor bench sparse --set lengths=16384,131072,1048576 --set flex=16384 --json $(RESULTS)/sparse.json
	$(TRAIN) --set curve=120 --json $(RESULTS)/training-gpu.json --plot $(RESULTS)/training-gpu.png
	$(TRAIN) --set length=32768 --set tokens=32768 --json $(RESULTS)/training-gpu-32k.json
	$(BIN)/phasor bench decode-gpu --json $(RESULTS)/decode_gpu.json
	$(BIN)/phasor bench fused --set parts=optimizer,float8 --json $(RESULTS)/fused.json
	$(BIN)/phasor bench scaling --json $(RESULTS)/scaling.json --plot $(RESULTS)/scaling.png
	$(BIN)/phasor bench stream --json $(RESULTS)/stream.json
	$(BIN)/phasor bench families --json $(RESULTS)/families.json

clean:
	rm -rf .venv build dist
