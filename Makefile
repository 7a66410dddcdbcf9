# make demo    trains a small language model on sparse labels: a few minutes on two cores
# make test    everything: builds, installs, runs all tests
# make test-paths   the tests of the kernels again, on each CPU path that `make test` has not taken
# make bench   speed and memory beside the peers
# make docs    the pages of docs/ with an API reference, into build/site; needs neither torch nor a compiler
# make test-wheel   one wheel, built with a CUDA torch, tested under a CPU torch (3 GB of downloads)
# make sdist        the source distribution, and a wheel built from it
# make gpu-kit      what a machine with a GPU and without a network needs, into gpu-kit/
#
# Each makes its own environment in .venv. TORCH chooses the torch to build against: make test TORCH=torch==2.14.1
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml build_backend.py $(wildcard csrc/*.* csrc/*/*.* sparse_ce/*.py sparse_ce/*/*.py)

# Two processes of a thread each; the tests of a file share what they have compiled.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
# What no kernel of the CPU has a part in: builds, emulation, and loops whose models take the time.
NOT_OF_KERNELS := $(wildcard tests/test_*build*.py tests/test_install.py tests/test_emulation*.py tests/test_gpu*.py \
	tests/test_benchmarks.py tests/test_collection.py tests/test_examples.py tests/test_trainer*.py \
	tests/test_lightning.py tests/test_distributed.py)

.PHONY: demo test test-paths bench docs test-wheel sdist clean

demo: $(VENV)/.demo
	$(BIN)/python examples/train_next_distribution.py

test: $(VENV)/.tests
	cd $(BIN) && ./python -m sparse_ce  # here the source tree, which has no libraries, would hide the installed package
	$(PYTEST)

test-paths: $(VENV)/.tests
	for path in $$(cd $(BIN) && ./python -c "import sparse_ce; print(*{'default', 'avx2'} - {sparse_ce.ops.instruction_set()})"); do \
		echo "== SPARSE_CE_CPU=$$path"; \
		SPARSE_CE_CPU=$$path $(PYTEST) -m "not slow" $(addprefix --ignore=,$(NOT_OF_KERNELS)) || exit 1; \
	done

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py

docs: build/docs/.environment
	NO_MKDOCS_2_WARNING=1 build/docs/bin/python -m mkdocs build --quiet --strict

build/docs/.environment: pyproject.toml
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install -q --upgrade pip
	build/docs/bin/python -m pip install -q --group docs
	touch $@

$(VENV)/.environment: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q "$(TORCH)" setuptools ninja
	touch $@

$(VENV)/.installed: $(VENV)/.environment $(SOURCES)
	$(BIN)/python -m pip install --no-deps --force-reinstall .
	touch $@

# sparse_ce itself is installed: of "sparse_ce[demo]" only what demo adds to it is not.
$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/python -m pip install -q "sparse_ce[demo]"
	touch $@

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install -q "sparse_ce[bench]"
	touch $@

$(VENV)/.tests: $(VENV)/.installed
	$(BIN)/python -m pip install -q "sparse_ce[test,demo]" nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm --group loops
	touch $@

test-wheel:
	bash .ci/wheel 2.14.1 $(TORCH:torch==%=%)

sdist:
	bash .ci/sdist

clean:
	rm -rf $(VENV) .venv-cuda build dist *.egg-info tests/emulation/build

.PHONY: gpu-kit
gpu-kit:
	$(PYTHON) benchmarks/gpu_kit.py
