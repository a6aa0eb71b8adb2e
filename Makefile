# The only commands a person has to know. `make help` lists them.

VENV        ?= .venv
PYTHON_BASE ?= python3

# What may be given on the command line. All of it reaches programs by the environment, as it was typed: no shell and no make looks into it.
VARIABLES := TUTORIAL CLUSTER WORKERS PRESET SET RESUME RESTARTS CHECKPOINT OPTIONS DRY RUNS FOLDER COMMAND TORCH PYTHON_BASE VENV
OTHERS    := SHELL DDP_% DASK_% PIP_% PYTHON% TORCH_% OMP_% MKL_% CUDA_% NCCL_% GLOO_% AWS_% SLURM_% MPL% TMPDIR %_PROXY %_proxy

define as_typed
ifneq ($(origin $(1)),undefined)
override $(1) := $$(value $(1))
export $(1)
endif
endef

command_line := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
unknown      := $(firstword $(filter-out $(VARIABLES) $(OTHERS) -%-,$(command_line)))
ifneq ($(unknown),)
$(error $(unknown)=$(value $(unknown)): make knows no variable of that name. It knows $(VARIABLES); $\
`make help` explains them. Settings of a tutorial go into SET, in small letters: SET="epochs=1 batch_size=64")
endif
$(foreach name,$(VARIABLES),$(eval $(call as_typed,$(name))))
tutorial := $(firstword $(filter $(basename $(notdir $(wildcard tutorials/*.ipynb))),$(MAKECMDGOALS)))
ifneq ($(tutorial),)
$(error "$(tutorial)" is the name of a tutorial. Write: make $(firstword $(filter-out $(tutorial),$(MAKECMDGOALS)) run) TUTORIAL=$(tutorial))
endif
ifneq ($(words $(VENV)),1)
$(error VENV=$(VENV): the folder of the environment must not have spaces in its name)
endif

PYTHON := "$$VENV/bin/python"
PIP    := $(PYTHON) -m pip install --disable-pip-version-check --constraint constraints.txt
UV     := "$$VENV/bin/uv" pip install --python $(PYTHON) --constraints constraints.txt

# Is the environment within this clone? Another one is compared, and only `make setup` changes it; the packages are the clone's in both.
a_word = $(subst %,?,$(subst $() $(),?,$(1)))
OURS  := $(filter $(call a_word,$(CURDIR))/%,$(call a_word,$(or $(realpath $(VENV)),$(abspath $(VENV)))))
ifeq ($(OURS),)
override PYTHONPATH := $(CURDIR)$(if $(value PYTHONPATH),:$(value PYTHONPATH))
export PYTHONPATH
endif

# With TORCH=cpu: the index of that build, and the version that only this index has
INDEX  := $${TORCH:+--index-url "https://download.pytorch.org/whl/$$TORCH"}
BUILD  := "torch==$$(sed -n 's/^torch==//p' constraints.txt)$${TORCH:+"+$$TORCH"}"

# What there is: an environment for the course, and what an extra of pyproject.toml adds to it
STAMP    := $(if $(or $(OURS),$(filter setup setup-all,$(MAKECMDGOALS))),$(VENV)/installed,fits)
COURSE   := $(STAMP)-course
TEST     := $(STAMP)-test
DOCS     := $(STAMP)-docs
TRAINERS := $(STAMP)-others

# What `make lint` looks at: programs, and the tutorials, which are pages of a notebook. Their lines end where a page cuts them off.
PROGRAMS := ddp_common dask_ranks benchmarks tests tutorials/kit tutorials/environment.py tutorials/hand_ins.py tutorials/lab.py tutorials/kernel.py tutorials/marks.py tutorials/scaling.py tutorials/study.py tutorials/sync.py tutorials/checks tutorials/originals docs data
PAGES    := --line-length 88 tutorials/scripts $(filter-out $(PROGRAMS),$(wildcard tutorials/*.py))

.PHONY: again help setup setup-all run lab kernel data test test-others test-slurm test-all lint sync bench scaling study marks doctor check fault-lab mutants slurm-lab docs clean

help:
	@echo 'make run TUTORIAL=pets      train a tutorial; sets everything up first'
	@echo '     WORKERS=3              number of ranks (default: physical cores, 2 to 4, or GPUs)'
	@echo '     SET="epochs=2"         change settings; a wrong name lists them all'
	@echo '     PRESET=original        mnist, pets, dogs, ucmerced: what the article behind it trained (docs/originals.md)'
	@echo '     PRESET=full            longer than a lesson has time for, with more data or a larger model; says what it needs'
	@echo '     CLUSTER=slurm          a profile in clusters/, the path of a .yaml file, or tcp://host:port'
	@echo '     OPTIONS="queue=gpu"    change options of the profile for this once; DRY=1: print the job script, submit nothing'
	@echo '     RESTARTS=3             after a failure, go on from the newest checkpoint, so many times'
	@echo '     RESUME=runs/pets/...   go on from the newest checkpoint of a run'
	@echo 'make lab                    open the notebooks in JupyterLab'
	@echo 'make kernel                 open them in another JupyterLab, such as a JupyterHub: make its kernel (docs/jupyterhub.md)'
	@echo 'make check                  look whether this machine is ready for a class: under a minute, and once set up nothing is downloaded'
	@echo 'make data TUTORIAL=pets     download the full data set (the tutorials work without)'
	@echo 'make test                   test all that a user relies on, the six notebooks included: about ten minutes on two cores'
	@echo 'make test-all               and the rest: a real Slurm, hosts, faults at many moments, what students do: three quarters of an hour in all'
	@echo 'make test-others            trainers of Accelerate, Lightning, timm and Transformers under ddprun and torchrun; installs them first'
	@echo 'make lint                   look at layout, mistakes, who imports whom, types, workflows; nothing is changed'
	@echo 'make sync                   write the notebooks from the scripts (TUTORIAL=pets: only this one)'
	@echo 'make bench                  measure launch, steps, resume, saves, data, tables, images, each beside its alternative: ten minutes on two cores'
	@echo 'make scaling TUTORIAL=pets  compare numbers of ranks: speed, and loss at equal samples (WORKERS="1 2 4")'
	@echo 'make study TUTORIAL=dogs    the study of the article behind dogs, on real ranks, and a fair one beside it (WORKERS="1 2 4")'
	@echo 'make marks FOLDER=hand-ins  judge what a class has handed in (TUTORIAL=pets: only this lesson)'
	@echo 'make doctor CLUSTER=slurm   check what usually goes wrong on a cluster; say what to do'
	@echo 'make mutants                judge 858 answers to the exercises, and write what the checks let pass: half an hour on two cores (TUTORIAL=pets: only this)'
	@echo 'make fault-lab              break two ranks in every known way; print what became of it'
	@echo 'make slurm-lab              a shell on a Slurm of four nodes on this machine, to practise on; needs root and slurm-wlm (COMMAND="sinfo": only this)'
	@echo 'make docs                   build the site, docs/_build/html; nothing is executed'
	@echo 'make setup                  only install, into .venv/ (PYTHON_BASE=: with this Python)'
	@echo '     VENV=/shared/env       into this folder, for all who read it; they write it behind every other make, which installs nothing there'
	@echo 'make setup-all              the same, and what tests, lint and docs need'
	@echo '     TORCH=cpu              the build of torch: cpu, cu130 or what else pytorch.org names (default: that of PyPI)'

setup: $(COURSE)

setup-all: $(TEST) $(DOCS)

# pip takes torch, since it knows the settings of a site (an index, a folder of wheels); uv takes the rest, in a tenth of the
# time, unless pip's settings forbid an index, which uv does not know. Where uv fails, pip says what is wrong.
$(VENV)/torch: constraints.txt $(if $(OURS),,again)
	@[ ! -e "$$VENV" ] || [ -w "$$VENV" ] || { \
	  echo "VENV=$$VENV: you may not write there. It is set up by whom it belongs to; \`make lab VENV=$$VENV\` uses it as it is."; exit 1; }
	@"$$PYTHON_BASE" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$$PYTHON_BASE is no Python of 3.11 or newer with the module venv (Debian, Ubuntu: apt install python3-venv)."; \
	  echo 'If there is another one, name it: make PYTHON_BASE=/path/to/python'; exit 1; }
	@case "$$TORCH" in *[!a-z0-9.]*) \
	  echo "TORCH=$$TORCH: it takes the last word of an address in https://download.pytorch.org/whl, such as TORCH=cpu or TORCH=cu130."; \
	  exit 1; esac
	@echo "Installing torch and some 100 packages into $$VENV, once: a minute or two, and longer where the network is slow."
	@"$$PYTHON_BASE" -m venv "$$VENV"
	@$(PIP) --no-deps $(INDEX) $(BUILD) torchvision
	@$(PIP) uv
	@touch "$$VENV/torch"

$(VENV)/installed-%: $(VENV)/torch pyproject.toml
	@$(if $(PIP_NO_INDEX),,$(UV) $(if $(OURS),--editable,--compile-bytecode --reinstall-package ddp-common) '.[$*]' ||) $(PIP) $(if $(OURS),--editable) '.[$*]'
	@$(if $(OURS),,rm -rf build)
	@touch "$$VENV/installed-$*"

fits-%:
	@[ -x "$$VENV/bin/python" ] || { echo "VENV=$$VENV: there is no Python, bin/python, that you may run. \`make setup VENV=$$VENV\` makes one."; exit 1; }
	@PYTHONDONTWRITEBYTECODE=1 $(PYTHON) tutorials/environment.py $*

$(TEST) $(DOCS) $(TRAINERS): $(COURSE)

run: $(COURSE)
	@$(PYTHON) -m tutorials run

data: $(COURSE)
	@$(PYTHON) -m tutorials data

lab: $(COURSE)
	@$(PYTHON) tutorials/lab.py

kernel: $(COURSE)
	@$(PYTHON) -m tutorials.kernel

# Every cell is a test. As many notebooks or files at a time as there are cores; those that take longest come first.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
CELLS        := -p tests.kernels --nbval --nbval-current-env --nbval-cell-timeout=800
NOTEBOOKS    := $(patsubst %,tutorials/%.ipynb,dogs pets ucmerced flights gpt mnist)

test: $(TEST)
	@$(PYTHON) -m pytest $(SIDE_BY_SIDE) $(CELLS) $(NOTEBOOKS) tests/distributed tests/unit

test-others: $(TEST) $(TRAINERS)
	@$(PYTHON) -m pytest $(SIDE_BY_SIDE) --dist loadgroup tests/others

test-slurm: $(TEST)
	@$(PYTHON) -m pytest -rs tests/hpc/test_slurm.py

test-all: test
	@$(PYTHON) -m pytest $(SIDE_BY_SIDE) -rs tests/hpc tests/notebooks tests/faults

lint: $(TEST)
	@$(PYTHON) -m ruff format --check $(PROGRAMS)
	@$(PYTHON) -m ruff check $(PROGRAMS)
	@$(PYTHON) -m ruff format --check $(PAGES)
	@$(PYTHON) -m ruff check $(PAGES)
	@"$$VENV/bin/lint-imports" --no-logo
	@$(PYTHON) -m mypy
	@$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(PYTHON) -m check_jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
	@$(PYTHON) -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/question.yml
	@$(PYTHON) -m check_jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	@$(PYTHON) -m check_jsonschema --builtin-schema vendor.citation-file-format --default-filetype yaml CITATION.cff

sync: $(TEST)
	@$(PYTHON) tutorials/sync.py $${TUTORIAL:+"$$TUTORIAL"}

bench: $(TEST)
	@$(PYTHON) benchmarks/bench.py

scaling: $(COURSE)
	@$(PYTHON) tutorials/scaling.py

study: $(COURSE)
	@$(PYTHON) tutorials/study.py

marks: $(COURSE)
	@$(PYTHON) tutorials/marks.py

doctor: $(COURSE)
	@$(PYTHON) -m dask_ranks doctor

check: $(COURSE)
	@$(PYTHON) -m tutorials check

slurm-lab: $(COURSE)
	@$(PYTHON) tests/hpc/slurm_lab.py

fault-lab: $(TEST)
	@$(PYTHON) benchmarks/fault_lab.py

mutants: $(TEST)
	@$(PYTHON) -m tests.mutants

docs: $(DOCS)
	@$(PYTHON) -m sphinx -q -W --keep-going -c docs . docs/_build/html
	@echo 'The site is built: open docs/_build/html/index.html'

clean:
	rm -rf "$$VENV" runs data/cache docs/_build

# Any other word. This is make's own $(error), not a shell's echo: what was typed reaches no shell.
.DEFAULT:
	@$(error There is no command "$@". `make help` lists them all)
