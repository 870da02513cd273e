# Every verb works alone on a fresh clone: it makes .venv first, once.
.PHONY: demo test test-full check docs fix
PYTHON_BIN := .venv/bin/python
JOBS ?= 2# test files at a time; each has processes of its own
COMPILE := $(PYTHON_BIN) -m compileall -q src# once, where PYTHONDONTWRITEBYTECODE would have every process do it again

demo: ## train on real text on all local devices, and end in a report
	@tools/setup.sh
	@.venv/bin/allranks train

test: ## the tests that a change must pass; JOBS=0 runs one after the other
	@tools/setup.sh dev
	@$(COMPILE)
	@$(PYTHON_BIN) -m pytest -n $(JOBS) --dist loadfile

test-full: ## the long tests too; PART=i/n runs one of n parts; what passed on this very source is not run again
	@tools/setup.sh dev
	@$(COMPILE)
	@$(PYTHON_BIN) -m pytest -n $(JOBS) --dist loadfile --full $(if $(PART),--part $(PART))

check: ## style, types, and a docs build in which a warning is an error
	@tools/setup.sh dev,docs
	@$(PYTHON_BIN) -m ruff check .
	@$(PYTHON_BIN) -m ruff format --check .
	@$(PYTHON_BIN) -m mypy
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_BIN) -m mkdocs build --strict --site-dir .cache/site-check

docs: ## the documentation, at site/index.html
	@tools/setup.sh dev,docs
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_BIN) -m mkdocs build --strict --site-dir site
	@echo "open site/index.html"

fix: ## what a machine can put right: format, imports, generated pages
	@tools/setup.sh dev,docs
	@$(PYTHON_BIN) -m ruff check --fix --quiet .
	@$(PYTHON_BIN) -m ruff format .
	@$(PYTHON_BIN) -m tools.generate
