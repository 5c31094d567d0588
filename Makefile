# make demo      set up, then show the overlay at work on this machine
# make test      set up, then lint and all tests that need no GPU
# make gpu-test  the tests that need a CUDA GPU
# make sm100     compiles the SM100 library whole, for every FlashInfer release that it knows (needs no GPU; 20 minutes on 2 cores)
# make lint, make wheel, make figures (RESULTS.md and the README's tables), make clean
# A second run skips the set-up. PYTHON=... picks the interpreter (3.10 to 3.13), VENV=... another place for the environment.

VENV := .venv
SGLANG := sglang==0.5.12.post1
# the release of transformers that sglang 0.5.12 pins does not import with kernels 0.13
# and the compiler of the CUDA that it brings, for the test that compiles our CUDA
ALSO := kernels<0.13 nvidia-cuda-nvcc~=13.0.0 nvidia-nvvm~=13.0.0 nvidia-cuda-crt~=13.0.0
NEXT_FLASHINFER := 0.6.12
PYTHON := $(shell for p in python3 python3.12 python3.11 python3.13 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.set-up

.PHONY: demo test gpu-test sm100 lint wheel figures clean tools
.DELETE_ON_ERROR:

demo: tools $(STAMP)
	$(RUN) benchmarks/demo.py

test: tools $(STAMP) lint
	TRITON_INTERPRET=1 $(RUN) -m pytest -m "not gpu" -ra --durations=10

gpu-test: $(STAMP)
	$(RUN) -m pytest -m gpu -ra

sm100: tools $(STAMP)
	$(RUN) tests/sm100/compile_library.py all
	$(RUN) -m pip install --disable-pip-version-check -q --no-deps --target $(VENV)/flashinfer-next \
		flashinfer-python==$(NEXT_FLASHINFER) flashinfer-cubin==$(NEXT_FLASHINFER)
	PYTHONPATH=$(VENV)/flashinfer-next $(RUN) tests/sm100/compile_library.py all

lint: $(STAMP)
	$(RUN) -m ruff check .

wheel: $(STAMP)
	$(RUN) -m pip wheel --no-deps -w dist .

figures: $(STAMP)
	$(RUN) benchmarks/report.py

# The overlay itself is not installed: a checkout runs from where it is.
$(STAMP): setup.cfg Makefile
	@test -n "$(PYTHON)" || { echo "make: no Python 3.10 to 3.13 found; name one: make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Setting up $(VENV) with $(SGLANG): about 10 GB, 2 to 10 minutes"
	$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(RUN) -c "import configparser as c; s = c.ConfigParser(); s.read('setup.cfg'); \
		print(s['options']['install_requires'], s['options.extras_require']['cli'], s['options.extras_require']['test'], sep='\n')" \
		> $(VENV)/needs.txt
	$(RUN) -m pip install --disable-pip-version-check "$(SGLANG)" $(foreach need,$(ALSO),"$(need)") -r $(VENV)/needs.txt
	@touch $@

# sglang's kernels link libcuda; where there is no driver the tests compile an empty one.
tools:
	@for t in gcc nm; do command -v $$t >/dev/null || { \
		echo "make: $$t is missing; the CPU engine needs it to build a stand-in for libcuda (Debian, Ubuntu: apt install gcc binutils)"; \
		exit 1; }; done

clean:
	rm -rf $(VENV) build dist *.egg-info
