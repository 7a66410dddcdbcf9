# make demo         trains a small language model on sparse labels: a few minutes on two cores
# make distill      what the tail of a teacher's top-k costs its students: minutes on two cores
# make test         the suite: builds, installs, tests; minutes on two cores
# make test-all     the suite, then its other flavours: other kernels, sanitizers, emulated CUDA, what takes long;
#                   WITHOUT="slow sanitized": but these
# make kernels      the CPU kernels that changed compiled again, into the environment: seconds a file
# make lint         ruff, mypy, pyright, clang-format, and what CONTRIBUTING says of the sources
# make mutants      breaks the code on purpose, one change at a time; MUTANTS="cpu tile.cpp" for some
# make bench        speed and memory beside the peers
# make docs         the pages of docs/ with an API reference, into build/site; needs neither torch nor a compiler
# make test-wheel   one wheel, built with a CUDA torch, tested under a CPU torch (3 GB of downloads)
# make sdist        the source distribution, and a wheel built from it
# make gpu-kit      what a machine with a GPU and without a network needs, into gpu-kit/
#
# Each makes its own environment in .venv. TORCH chooses the torch to build against: make test TORCH=torch==2.14.1
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml build_backend.py \
           $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.* sparse_ce/*.py sparse_ce/*/*.py)

# Two processes of a thread each; the tests of a file share what they have compiled. The order is tests/flavours.py's. A
# process that dies ends the run: others in its place would die of the same test, and pytest-xdist then waits for ever.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo distill test test-all kernels lint mutants bench docs test-wheel sdist gpu-kit clean

demo: $(VENV)/.demo
	$(BIN)/python examples/train_next_distribution.py

distill: $(VENV)/.demo
	$(BIN)/python examples/distill.py

test: $(VENV)/.tests
	cd $(BIN) && ./python -m sparse_ce  # here the source tree, which has no libraries, would hide the installed package
	$(PYTEST)

test-all: test
	for flavour in $$($(BIN)/python tests/flavours.py --without $(WITHOUT)); do \
		echo "== SPARSE_CE_FLAVOUR=$$flavour"; \
		SPARSE_CE_FLAVOUR=$$flavour $(PYTEST) || exit 1; \
	done

# Into the installed package, past pip. ninja compiles what changed.
kernels: $(VENV)/.environment
	SPARSE_CE_CUDA=$${SPARSE_CE_CUDA:-0} $(BIN)/python setup.py -q build_ext --build-lib build/kernels
	cd $(BIN) && cp $(CURDIR)/build/kernels/sparse_ce/_C*.so \
		"$$(dirname "$$(./python -c 'from importlib.util import find_spec as f; print(f("sparse_ce").origin)')")"

lint: $(VENV)/.lint
	PATH=$(BIN):$$PATH $(BIN)/python .ci/lint

mutants: $(VENV)/.tests
	$(BIN)/python tests/mutants.py $(MUTANTS)

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
	$(BIN)/python -m pip install -q "$(TORCH)" "setuptools>=77" ninja
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
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/vision "torchvision==0.28.*" "timm==1.0.*"
	touch $@

# With the training libraries: what the pages make of them is looked at as well.
$(VENV)/.lint: $(VENV)/.installed
	$(BIN)/python -m pip install -q --group lint --group loops
	touch $@

test-wheel:
	bash .ci/wheel 2.14.1 $(TORCH:torch==%=%)

sdist:
	bash .ci/sdist

clean:
	rm -rf $(VENV) .venv-cuda build dist *.egg-info tests/emulation/build

gpu-kit:
	$(PYTHON) benchmarks/gpu/gpu_kit.py
