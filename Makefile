# make demo    trains a small language model on sparse labels: a few minutes on two cores
# make test    everything: builds, installs, runs all tests
# make bench   speed and memory beside the peers
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

.PHONY: demo test bench test-wheel sdist clean

demo: $(VENV)/.demo
	$(BIN)/python examples/train_next_distribution.py

test: $(VENV)/.tests
	cd $(BIN) && ./python -m sparse_ce  # here the source tree, which has no libraries, would hide the installed package
	$(BIN)/python -m pytest

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/run.py

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
