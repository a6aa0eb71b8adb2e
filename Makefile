# The only commands a person has to know. `make help` lists them.

export CLUSTER WORKERS PRESET SET RESUME RESTARTS CHECKPOINT OPTIONS DRY

VENV     := .venv
PYTHON   := $(VENV)/bin/python
STAMP    := $(VENV)/installed
TUTORIAL ?=
# arguments of pip for torch and torchvision; empty: the build that pip offers on this machine
TORCH    ?=

.PHONY: help setup run lab data test sync bench scaling doctor fault-lab clean

help:
	@echo 'make run TUTORIAL=pets      train a tutorial; sets everything up first'
	@echo '     WORKERS=3              number of ranks (default: physical cores, 2 to 4, or GPUs)'
	@echo '     SET="epochs=2"         change settings; a wrong name lists them all'
	@echo '     PRESET=full            the sizes of the original experiment'
	@echo '     CLUSTER=slurm          a profile in clusters/, the path of a .yaml file, or tcp://host:port'
	@echo '     OPTIONS="queue=gpu"    change options of the profile for this once; DRY=1: print the job script, submit nothing'
	@echo '     RESTARTS=3             after a failure, go on from the newest checkpoint, so many times'
	@echo '     RESUME=runs/pets/...   go on from the newest checkpoint of a run'
	@echo 'make lab                    open the notebooks in JupyterLab'
	@echo 'make data TUTORIAL=pets     download the full data set (the tutorials work without)'
	@echo 'make test                   run all tests, the notebooks included'
	@echo 'make sync                   write the notebooks from the scripts (TUTORIAL=pets: only this one)'
	@echo 'make bench                  measure launch, steps, data, faults, clusters, images; print ratios, write runs/bench*.json'
	@echo 'make scaling TUTORIAL=pets  compare numbers of ranks: speed, and loss at equal samples (WORKERS="1 2 4")'
	@echo 'make doctor CLUSTER=slurm   check what usually goes wrong on a cluster; say what to do'
	@echo 'make fault-lab              break two ranks in every known way; print what became of it'
	@echo 'make setup                  only install, into $(VENV)/'
	@echo '     TORCH="--index-url URL"  take torch and torchvision from the index that pytorch.org'
	@echo '                            names for your CUDA version, or for the CPU'

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@for python in $(PYTHON_BASE) python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; done; \
	if [ -z "$$found" ]; then \
	  echo 'No Python 3.11 or newer with the module venv was found (tried python3, python3.14 ... python3.11, python).'; \
	  echo 'Install one (Debian, Ubuntu: apt install python3 python3-venv; elsewhere: python.org or conda), or name it: make PYTHON_BASE=/path/to/python'; \
	  exit 1; fi; \
	echo "Setting up $(VENV)/ with $$($$found --version): a few minutes, once."; \
	$$found -m venv $(VENV)
	@if [ -n "$(TORCH)" ]; then echo 'Installing torch and torchvision ($(TORCH))'; \
	  $(PYTHON) -m pip install --quiet --disable-pip-version-check $(TORCH) -c constraints.txt torch torchvision; fi
	@echo 'Installing the packages of pyproject.toml in the versions of constraints.txt'
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(STAMP)
	@$(PYTHON) -m ddp_common run "$(TUTORIAL)"

data: $(STAMP)
	@$(PYTHON) -m ddp_common data "$(TUTORIAL)"

lab: $(STAMP)
	@$(PYTHON) tutorials/lab.py

test: $(STAMP)
	@$(PYTHON) -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

sync: $(STAMP)
	@$(PYTHON) tutorials/sync.py $(TUTORIAL)

bench: $(STAMP)
	@$(PYTHON) tests/benchmarks/bench.py
	@$(PYTHON) tests/benchmarks/mnist.py
	@$(PYTHON) tests/benchmarks/faults.py
	@$(PYTHON) tests/benchmarks/clusters.py
	@$(PYTHON) tests/benchmarks/images.py

scaling: $(STAMP)
	@$(PYTHON) -m ddp_common scaling "$(TUTORIAL)"

doctor: $(STAMP)
	@$(PYTHON) -m ddp_common doctor

fault-lab: $(STAMP)
	@$(PYTHON) tests/fault_lab.py

clean:
	rm -rf $(VENV) runs data/cache
