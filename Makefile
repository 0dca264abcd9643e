# Needs GNU make and a Python of at least 3.11; everything else goes into .venv.

# Any of these can be given: make course PYTHON=python3.12
PYTHON ?=
PIP_FLAGS ?=
CONSTRAINTS ?= constraints.txt
JOBS ?= 2
NBVAL ?= --nbval
GATE ?= gate
NOTEBOOKS ?=
COLAB ?=
MINUTES ?= 30
CARD ?=
FRESH ?=

BIN := .venv/bin
TOOLS := tests/tools
INSTALLED := .venv/.installed
# All solutions run in one kernel, as one notebook.
SOLUTIONS := --ignore=notebooks/solutions build/solutions.ipynb

# Where a container says so, each of some hundred processes would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help card course lab site test test-all gate notebooks format figure repo-url constraints dist try-card try-colab try-cuda try-fresh clean

help:
	@echo 'make course      run every chapter on this machine, then look at build/course/index.html'
	@echo 'make card        all that the project wants from this GPU, MINUTES=30 of it: again to go on; ends with a file to send'
	@echo 'make lab         open the notebooks in JupyterLab'
	@echo 'make site        the course as web pages from the stored outputs: build/site/index.html'
	@echo 'make test        what CI runs: the gate, the unit tests, every notebook with its outputs compared (CPU only)'
	@echo 'make test-all    the same with the exhaustive tests: hours'
	@echo 'make gate        only the quick checks: ruff, types, the layers of the packages, the form of the notebooks'
	@echo 'make notebooks   run all notebooks and store their outputs in canonical form'
	@echo 'make format      lay out code and notebooks as the gate wants them, without running anything'
	@echo 'make figure      draw the pictures of the README and the cheat sheet again'
	@echo 'make try-colab   install into an empty environment as Colab does, and run a chapter there'
	@echo 'make try-cuda    run every notebook as on a T4, an RTX 4090 and two H100, without a GPU (Linux, CUDA build of torch)'
	@echo 'make try-card    make card as on a T4, an RTX 4090 and an H100, without a GPU: hours'
	@echo 'make try-fresh   build the wheel and run it in an empty environment with the newest of everything, or the floors (gigabytes)'
	@echo 'make dist        build the packages that a release publishes, check them, run them in an empty environment: dist/'
	@echo 'make repo-url    write the repository address (URL=https://github.com/OWNER/NAME) into badges and set-up cells'
	@echo 'make constraints write constraints.txt from what .venv holds'
	@echo 'make clean       remove .venv, build/ and caches'
	@echo
	@echo 'NOTEBOOKS=…      for course, notebooks, try-colab and try-cuda: only these, like NOTEBOOKS=notebooks/05_lora.ipynb'
	@echo 'PYTHON=…         the interpreter that .venv is made with (found by itself: 3.11 or newer)'
	@echo 'PIP_FLAGS=…      more flags for pip. On Linux without an NVIDIA GPU, save gigabytes with'
	@echo '                 PIP_FLAGS="--extra-index-url ADDRESS", the address being that of the CPU wheel index of PyTorch'
	@echo 'CARD=…           for try-card: "--card T4" takes only that one'
	@echo 'COLAB=…          for try-colab: "--prefix FOLDER", a Python with the versions of tests/tools/colab.txt, and "--card T4"'
	@echo 'FRESH=…          for try-fresh: "--floor" takes the lowest versions that pyproject.toml allows,'
	@echo '                 "--write" stores the versions that passed as the newest tested ones'
	@echo 'SITE_URL=…       for site: where it will stand, with a slash at its end; pages then name themselves and a picture'
	@echo 'CONSTRAINTS=…    another version set for pip; empty for the newest of everything'

# Made once, and again when the requirements change.
$(INSTALLED): pyproject.toml $(wildcard $(CONSTRAINTS))
	@python='$(PYTHON)'; found=; \
	for p in $${python:-python3.11 python3.12 python3.13 python3.14 python3 python}; do \
		if "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$p; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "No Python of at least 3.11 with its venv module was found: install one, or name it with PYTHON=…" >&2; exit 1; \
	fi; \
	echo "Making .venv with $$found; the first time takes minutes"; \
	"$$found" -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) \
		$(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[course,lab,site,test]'
	@touch $@

course: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/course.py $(NOTEBOOKS)

card: $(INSTALLED)
	@$(BIN)/vramlab card --minutes $(MINUTES) --folder build/card
	@$(BIN)/vramlab share build/card --folder build/card/to_send --no-browse

lab: $(INSTALLED)
	$(BIN)/jupyter lab notebooks

# Offline, and with warnings and broken links as errors.
site: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/make_site.py

# One pytest for everything: its closing lines are the last that is printed. A notebook's cells stay on one worker.
test: $(GATE) $(INSTALLED)
	@$(BIN)/python $(TOOLS)/join_solutions.py
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
		$(NBVAL) --nbval-current-env --nbval-cell-timeout 300 --nbval-kernel-startup-timeout 180 \
		--nbval-sanitize-with $(TOOLS)/sanitize.cfg tests notebooks $(SOLUTIONS)

# The exhaustive grids and random draws too: hours, run on a schedule.
test-all: $(GATE) $(INSTALLED)
	@$(BIN)/python $(TOOLS)/join_solutions.py
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'slow or not slow' \
		$(NBVAL) --nbval-current-env --nbval-cell-timeout 300 --nbval-kernel-startup-timeout 180 \
		--nbval-sanitize-with $(TOOLS)/sanitize.cfg tests notebooks $(SOLUTIONS)

dist: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/release.py $(if $(TAG),--tag $(TAG)) --pip-flags '$(PIP_FLAGS)'

gate: $(INSTALLED)
	@mkdir -p build
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo --no-cache >build/layers.txt || { cat build/layers.txt; exit 1; }
	@MYPYPATH=helpers $(BIN)/mypy --no-error-summary
	@$(BIN)/python $(TOOLS)/canonical.py --check

notebooks: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/execute.py $(NOTEBOOKS)

format: $(INSTALLED)
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format .
	@$(BIN)/python $(TOOLS)/canonical.py --write

figure: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/readme_figure.py

repo-url: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/repo_url.py '$(URL)'

constraints: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/pins.py installed > constraints.new && mv constraints.new constraints.txt

try-colab: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/try_colab.py $(COLAB) $(NOTEBOOKS)

try-fresh: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/try_fresh.py --pip-flags='$(PIP_FLAGS)' $(FRESH)

try-cuda: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/try_cuda.py $(NOTEBOOKS)

try-card: $(INSTALLED)
	@$(BIN)/python $(TOOLS)/try_card.py $(CARD)

clean:
	rm -rf .venv build .pytest_cache .ruff_cache .hypothesis helpers/*.egg-info
	find helpers tests notebooks -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
