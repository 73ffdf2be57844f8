# What a person or a CI machine does with this repository. `make` alone explains itself.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
# Bytecode halves the start of every worker, whatever the environment says about it.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
READY := .venv/.ready
UV := $(shell uv --version >/dev/null 2>&1 && echo uv || echo .uv/bin/uv)
COMPILE := $(UV) pip compile --quiet --no-header --generate-hashes --python-version 3.11 $(LOCK_OPTIONS)
EXAMPLE := examples/text-to-sql
CORPUS := $(EXAMPLE)/data
JOB := $(EXAMPLE)/finetunejob.yaml
RUN := runs/text-to-sql
FAULT_RECORDS := benchmarks/results/faults.jsonl
BUCKET_FAULT_RECORDS := benchmarks/results/bucket_faults.jsonl
SERVING_FAULT_RECORDS := benchmarks/results/serving_faults.jsonl
FUZZ_RECORDS := benchmarks/results/fuzz.jsonl
PIP_AUDIT := 2.10.1
GOVULNCHECK := v1.9.0
FUZZ_MINUTES ?= 60
PYTHONS ?= python3.12 python3.13

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(READY) ## Build .venv with the pinned versions (instant when nothing changed; installs uv when missing)
	@echo "The environment is ready: .venv"

.uv/bin/uv:
	python3 -m pip install --quiet --root-user-action ignore --target .uv uv

$(READY): pyproject.toml tests/cluster/pyproject.toml constraints/dev.txt $(filter .uv/bin/uv,$(UV))
	$(UV) venv --quiet --allow-existing --python 3.11 .venv
	$(UV) pip sync --quiet --require-hashes --python $(BIN)/python --compile-bytecode constraints/dev.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable . --editable tests/cluster
	$(BIN)/python -m compileall -q api client operator serve trainer
	touch $@

.PHONY: demo
demo: $(READY) ## Train the text-to-SQL example on two CPU workers, from generating its corpus to five predictions and a served answer
	$(BIN)/python $(EXAMPLE)/generate.py
	$(BIN)/spotune shard $(CORPUS)/train.jsonl --job $(JOB) --directory $(CORPUS)/shards/train
	$(BIN)/spotune shard $(CORPUS)/eval.jsonl --job $(JOB) --directory $(CORPUS)/shards/eval
	$(BIN)/python $(EXAMPLE)/baseline.py
	$(BIN)/spotune run $(JOB) --directory $(RUN)
	@mkdir -p build
	head --lines 5 $(CORPUS)/eval.jsonl > build/questions.jsonl
	$(BIN)/spotune predict $(RUN) --file build/questions.jsonl --output json
	@echo "The right answers are:"
	@sed --regexp-extended 's/.*"sql": "(([^"\\]|\\.)*)".*/\1/' build/questions.jsonl
	SPOTUNE=$(BIN)/spotune $(EXAMPLE)/ask.sh $(RUN)
	@echo "The model is trained, and the server of this answer is stopped. To ask it more: $(BIN)/spotune serve $(RUN)"
	@echo "To lose a node of a cluster on this machine: docs/quick-start/test-cluster.md"

.PHONY: lock
lock: $(filter .uv/bin/uv,$(UV)) ## Pin versions and hashes in constraints/ again (LOCK_OPTIONS=--upgrade for the newest ones)
	$(COMPILE) --annotation-style line --extra client --extra operator --extra serve --extra trainer --extra lm-eval --group dev --output-file constraints/dev.txt pyproject.toml
	$(COMPILE) --no-annotate --extra client --constraints constraints/dev.txt --output-file constraints/client.txt pyproject.toml
	$(COMPILE) --no-annotate --extra trainer --constraints constraints/dev.txt --output-file constraints/trainer.txt pyproject.toml
	$(COMPILE) --no-annotate --extra operator --constraints constraints/dev.txt --output-file constraints/operator.txt pyproject.toml
	$(COMPILE) --no-annotate --extra serve --constraints constraints/dev.txt --output-file constraints/serve.txt pyproject.toml
	$(COMPILE) --no-annotate --extra serve --extra vllm --output-file constraints/serve-vllm.txt pyproject.toml
	$(COMPILE) --no-annotate --group build --output-file constraints/build.txt

.PHONY: manifests
manifests: $(READY) ## Write manifests/, docs/reference/ and what is made from the chart's values again, after a change of what they are made of
	$(BIN)/spotune crd > manifests/crd.yaml
	$(BIN)/python charts/generate.py
	$(BIN)/python -m tests.cluster.chart > manifests/install.yaml
	$(BIN)/python -m docs.generate
	$(BIN)/python -m docs.pictures
	$(BIN)/python -m benchmarks.recovery_page > docs/recovery.md
	$(BIN)/python -m benchmarks.throughput_page
	$(BIN)/python -m benchmarks.trace_page
	$(BIN)/python -m benchmarks.deadline_page

.PHONY: docs
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(READY) ## The documentation as a site, in build/site (SPOTUNE_REPOSITORY=https://... makes links to files of the repository)
	$(BIN)/mkdocs build --strict # not --quiet, to which a warning is none

.PHONY: cluster-packages
cluster-packages: $(READY) ## Install the Debian packages that the test cluster needs (as root)
	apt-get update --quiet --quiet
	apt-get install --quiet --quiet --yes --no-install-recommends $$($(BIN)/spotune-testcluster packages) > /dev/null

.PHONY: cluster-build
cluster-build: $(READY) ## Build Kubernetes, KubeRay and the images for the test cluster (12 minutes once, kept in ~/.cache)
	$(BIN)/spotune-testcluster build

.PHONY: images
images: $(READY) ## Build the images of the Dockerfile by buildah, for the test cluster: build/images (as root)
	apt-get install --quiet --quiet --yes --no-install-recommends buildah mmdebstrap > /dev/null
	$(BIN)/python -m tests.cluster.own_images build/images

.PHONY: images-reproducible
images-reproducible: $(READY) ## Build the operator's image twice from scratch, and compare each byte (as root; TARGET=trainer for another one)
	apt-get install --quiet --quiet --yes --no-install-recommends buildah mmdebstrap > /dev/null
	$(BIN)/python -m tests.cluster.reproducible_images build/reproducible $(or $(TARGET),operator)

.PHONY: test-cluster
test-cluster: cluster-build ## The tests on a real Kubernetes alone (tests/cluster/README.md)
	$(BIN)/pytest -m cluster tests

.PHONY: emulators
emulators: $(READY) ## Install the emulators of Google's and Azure's stores that tests use (once, kept in ~/.cache/spotune)
	$(BIN)/python -m tests.emulators

.PHONY: test-long
test-long: emulators ## The tests that `make test` leaves out for their time
	@if $(BIN)/spotune-testcluster check; then $(MAKE) --no-print-directory cluster-build; fi
	$(BIN)/pytest -m long

.PHONY: faults
faults: cluster-build ## Put training jobs through every fault on a real Kubernetes, and write docs/faults.md (an hour or two; goes on when killed, AGAIN=1 runs all)
	@if [ -n "$(AGAIN)" ]; then rm -f $(FAULT_RECORDS); fi
	failed=0; SPOTUNE_FAULTS_RECORDS=$(FAULT_RECORDS) $(BIN)/pytest tests/cluster/faults/rendered_job.py tests/cluster/faults/elastic.py tests/cluster/faults/suite.py || failed=1; \
	$(BIN)/python -m tests.cluster.faults.report $(FAULT_RECORDS) --output docs/faults.md; exit $$failed

.PHONY: bucket-faults
bucket-faults: cluster-build ## Put training jobs whose only storage is a bucket through faults on a real Kubernetes, and write docs/bucket-faults.md (half an hour; goes on when killed, AGAIN=1 runs all)
	@if [ -n "$(AGAIN)" ]; then rm -f $(BUCKET_FAULT_RECORDS); fi
	failed=0; SPOTUNE_FAULTS_RECORDS=$(BUCKET_FAULT_RECORDS) $(BIN)/pytest tests/cluster/faults/bucket_suite.py || failed=1; \
	$(BIN)/python -m tests.cluster.faults.report $(BUCKET_FAULT_RECORDS) --bucket --output docs/bucket-faults.md; exit $$failed

.PHONY: serving-faults
serving-faults: cluster-build ## Put a service with 220 open streams through every fault on a real Kubernetes, and write docs/serving-faults.md (an hour)
	@command -v redis-check-rdb > /dev/null || { echo "Redis is not installed: apt-get install --no-install-recommends redis-tools"; exit 1; }
	@rm -f $(SERVING_FAULT_RECORDS)
	failed=0; SPOTUNE_SERVING_FAULTS_RECORDS=$(SERVING_FAULT_RECORDS) $(BIN)/pytest tests/cluster/serving_faults/suite.py || failed=1; \
	$(BIN)/python -m tests.cluster.serving_faults.report $(SERVING_FAULT_RECORDS) --output docs/serving-faults.md; exit $$failed

.PHONY: chaos
chaos: cluster-build ## Many overlapping faults on training jobs and a service on a real Kubernetes, and docs/chaos.md (SEED=3 or SEEDS=1-25, JOBS=2, FAULTS=40, ten minutes a seed, goes on when killed; REDUCE=3 finds the few faults that fail)
	$(BIN)/python -m tests.cluster.chaos --jobs $(or $(JOBS),2) --faults $(or $(FAULTS),40) $(if $(REDUCE),--reduce $(REDUCE),--seeds $(or $(SEED),$(SEEDS),1-25) --output docs/chaos.md)

.PHONY: proof
proof: $(READY) ## Play eighty schedules of kills and changes of the world size, and write docs/proof.md (over an hour; goes on when killed)
	$(BIN)/python -m tests.proof --seeds 1-80 --jobs 2 --output docs/proof.md

.PHONY: proof-recovery
proof-recovery: $(READY) ## Play recovery schedules without a record (SEEDS=101-300 JOBS=2), and write docs/proof-recovery.md (hours; goes on when killed)
	$(BIN)/python -m tests.proof.recovery --seeds $(or $(SEEDS),101-300) --jobs $(or $(JOBS),2)

.PHONY: fuzz
fuzz: $(READY) ## Random inputs for every parser of what others write, and docs/fuzzing.md (FUZZ_MINUTES=60 for each of 20; goes on when killed, AGAIN=1 runs all)
	@if [ -n "$(AGAIN)" ]; then rm -f $(FUZZ_RECORDS); fi
	$(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES) --records $(FUZZ_RECORDS) --output docs/fuzzing.md

.PHONY: versions
versions: $(READY) ## The fast tests with other Pythons (PYTHONS="python3.12 python3.13"), and docs/support.md (half an hour each; goes on when killed)
	failed=0; for python in $(PYTHONS); do $(BIN)/python -m tests.versions fast --python $$python || failed=1; done; \
	$(BIN)/python -m tests.versions page; exit $$failed

.PHONY: audit
audit: $(READY) ## Known vulnerabilities of the pinned packages, by pip-audit and govulncheck (needs their databases on the internet)
	@failed=0; for pins in operator trainer serve; do \
	  $(UV) tool run pip-audit==$(PIP_AUDIT) --strict --disable-pip --require-hashes --requirement constraints/$$pins.txt || failed=1; done; \
	cd tests/cluster/binaries && go run golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK) ./... || failed=1; exit $$failed

.PHONY: sbom
sbom: $(filter .uv/bin/uv,$(UV)) ## What operator, trainer and serve are made of, as CycloneDX with the hash of every file: build/sbom
	@mkdir -p build/sbom
	for pins in operator trainer serve; do $(UV) tool run --from cyclonedx-bom --constraints constraints/build.txt cyclonedx-py \
	  requirements constraints/$$pins.txt --pyproject pyproject.toml --output-reproducible --output-file build/sbom/$$pins.cdx.json; done

.PHONY: release-check
release-check: $(READY) ## Which pages and benchmarks were made at another code than HEAD (TAG=v0.1.0 for a tag's, NAMES=docs/ for pages alone); fails if any was
	$(BIN)/python -m tests.releases.check --revision $(or $(TAG),HEAD) $(NAMES)

.PHONY: scale
scale: cluster-build ## A thousand FinetuneJobs and a hundred ModelServices against as many RayJobs and RayServices, written to benchmarks/results/scale.json (half an hour)
	$(BIN)/python -m benchmarks.scale --output benchmarks/results/scale.json

.PHONY: clean
clean: ## Remove caches, reports and the demo's corpus; runs/ and .venv stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(EXAMPLE)/data
	find api client operator serve trainer tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

.PHONY: format
format: $(READY) ## Rewrite the code as ruff wants it
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format --quiet .

.PHONY: lint
lint: $(READY) ## Style, spelling, and which package may import which
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/codespell
	@mkdir -p build
	$(BIN)/lint-imports > build/imports.txt || { cat build/imports.txt; exit 1; }

.PHONY: type
type: $(READY) ## mypy --strict over code, tests, examples and benchmarks
	$(BIN)/mypy --num-workers 2

.PHONY: test-fast
test-fast: $(READY) ## The tests for the inner loop: no Ray, no cluster, no rank processes
	$(BIN)/pytest -m "not cluster and not ray and not long and not slow"

.PHONY: test
test: $(READY) ## All that CI runs: lint, type, every test but the long ones
	@rm -rf build/pytest-*
	@$(MAKE) --no-print-directory --keep-going --jobs 3 $(GROUPS:%=checked-%)
	@$(MAKE) --no-print-directory second-tries
	@echo "The ten slowest tests:"
	@grep --no-filename --extended-regexp '^[0-9.]+s (call|setup|teardown) ' build/pytest-*.txt | sort --numeric-sort --reverse | sed --quiet 1,10p
	@cat build/failed.txt
	@tail --quiet --lines 1 build/pytest-*.txt

.PHONY: coverage
coverage: export PYTHONPATH := $(CURDIR)/tests/coverage
coverage: $(READY) ## The tests without a Kubernetes, measured: coverage of api >= 95 %, serve and trainer >= 85 % (an hour)
	@mkdir -p build/coverage
	$(BIN)/coverage erase
	@$(MAKE) --no-print-directory --keep-going --jobs 2 test-ranks test-here test-ray PYTEST="$(BIN)/coverage run -m pytest"
	$(BIN)/coverage combine --quiet
	@rm -f build/coverage/data.*  # what a process was writing when a test killed it
	$(BIN)/coverage report --include 'api/*' --fail-under 95
	$(BIN)/coverage report --include 'serve/*' --fail-under 85
	$(BIN)/coverage report --include 'trainer/*' --fail-under 85

# The parts of `make test`, the longest first. Three run at a time on two processors, because the tests on the cluster wait
# for pods a part of their time: what runs beside them has a lower priority, and takes what they leave. Those with ranks take
# about twice as long as the many small ones, and those on a Ray start when the small ones have ended. So the former have
# a higher priority than the small ones: the last minutes, in which one group runs alone, leave a processor idle.
# No test starts if the code breaks a rule of style or types.
# A test that fails is tried once more after all others, because the machine may be shared: not what is in tests/proof, and
# not if more than 20 have failed. The last lines name each; mend it as any other bug.
PYTEST := $(BIN)/pytest
GROUPS := kubernetes ranks here ray
.PHONY: $(GROUPS:%=checked-%) $(GROUPS:%=test-%) cluster-build-here second-tries
checked-kubernetes: cluster-build-here
$(GROUPS:%=checked-%): checked-%: lint type # 1: tests have failed, and the group came to its end
	@$(MAKE) --no-print-directory test-$* || grep --quiet --line-regexp 1 build/pytest-$*.code
cluster-build-here: # where the machine cannot run a cluster, its tests are skipped by name
	@$(BIN)/python -m compileall -q api client operator serve trainer # pods share this folder, and cannot write what changed since the set-up
	@if $(BIN)/spotune-testcluster check; then $(BIN)/spotune-testcluster build; fi
# $(call group,NAME,PREFIX,ARGUMENTS,SHOW): run a group; build/ has its output, its exit code and, for pytest, what has failed
group = mkdir -p build; rm -rf build/pytest-$(1)*; \
	{ code=0; $(2) $(PYTEST) -o cache_dir=build/pytest-$(1) $(3) 2>&1 || code=$$?; echo $$code > build/pytest-$(1).code; } \
	| { $(or $(4),cat > build/pytest-$(1).txt; cat build/pytest-$(1).txt); }; exit $$(cat build/pytest-$(1).code)
WITHOUT_CLUSTER := env --unset SPOTUNE_TEST_REQUIRE_CLUSTER # which may still be built meanwhile
test-kubernetes: # tests/conftest.py knows the folders of these and of the tests on a Ray; to collect all others takes longer
	@echo "The tests on a real Kubernetes, the small ones and those on a Ray write to build/pytest-*.txt, shown once they have ended."
	@$(call group,kubernetes,,-m "cluster and not long" tests/cluster)
test-ranks:
	@$(call group,ranks,nice -n 8 $(WITHOUT_CLUSTER),-m "slow and not cluster and not ray and not long",tee build/pytest-ranks.txt)
test-here:
	@$(call group,here,nice -n 10 $(WITHOUT_CLUSTER),-m "not cluster and not ray and not long and not slow")
test-ray:
	@$(call group,ray,nice -n 5 $(WITHOUT_CLUSTER),-m "ray and not long" tests/examples tests/proof tests/releases tests/serve tests/trainer)
second-tries:
	@sed --quiet --regexp-extended 's/^(FAILED|ERROR) tests/Failed at the first try: tests/p' build/pytest-*.txt > build/failed.txt
	@if grep --quiet ': tests/proof/' build/failed.txt || test $$(wc --lines < build/failed.txt) -gt 20; then cat build/failed.txt; echo "No second try."; exit 1; fi
	@failed=0; for code in $$(grep --files-with-matches --line-regexp 1 build/pytest-*.code); do folder=$${code%.code}; \
		$(PYTEST) -o cache_dir=$$folder --last-failed --last-failed-no-failures none > $$folder-again.txt 2>&1 || failed=1; cat $$folder-again.txt; done; exit $$failed
