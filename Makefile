# One command each; `make help` lists them. Each target runs the set-up first, which takes well under a second once it is
# complete. Settings, with their defaults in brackets:
#
#   PYTHON=/path/to/python3        the interpreter for .venv, 3.11 or newer
#   PYTEST_ARGS='-k lease -x'      arguments of pytest
#   DEMO_ARGS='...'                arguments of `kvstore demo`
#   MUTANTS='name ...'             `make mutants`: only planted bugs whose name contains one of these words
#   FUZZ_RUNS='C PYTHON'           `make fuzz`: the number of inputs for the C core, and for each Python parser
#   TRIGGERKV_KILL_ROUNDS=n        `make crash`: how often the node is killed
#   TRIGGERKV_CRASH_SEEDS=n        `make crash`: runs on a simulated drive, with four crashes each
#   TRIGGERKV_PEERS_ROUNDS=n       `make bench-peers`: rounds (5); 1 for a first look
#   TRIGGERKV_TWIN_ROUNDS=n        `make bench-twin`: rounds (3)
#   TRIGGERKV_KEYRING_ENDS=n       `make test-keyring`: interruptions of each step of a keyring (6)
#   TRIGGERKV_HOSTILE_S=n          `make test-hostile`: seconds for each attack (2.4)
#   TRIGGERKV_SOAK_S=n             `make soak`: seconds of puts
#   TRIGGERKV_MIXED_ROUNDS=n       `make mixed`: histories of each kind of node (100)
#   TRIGGERKV_CHAOS_ROUNDS=n       `make test-cluster`: rounds between hosts (300), fifteen for each cluster
#   TRIGGERKV_CHAOS_SEED=n         `make test-cluster`: the seed of the first cluster
#   TRIGGERKV_CHAOS_KINDS='...'    `make test-cluster`: these failures in this order (tests/hosts/chaos.py), not random ones
#   TRIGGERKV_CLUSTER_ROUNDS=n     `make test-cluster`: rounds in which nodes of one host die or hang (300)
#   TRIGGERKV_CONVERSATION_RUNS=n  `make test-engines`: runs of ten conversations during failures (1)
#   TRIGGERKV_SEED=n               `make test-engines`, `make mixed`: the seed of the first run
#   TRIGGERKV_CASSINI_MODES=1      tests/conformance/test_cassini.py: all four pairs of the NIC's rules, not two (`make crash` sets it)
#   TRIGGERKV_RANDOM_EXAMPLES=1    Hypothesis draws other examples in each run; without it, always the same ones
#   TRIGGERKV_MACHINE_EXAMPLES=n   sequences of 100 steps in which a store is compared with a dict
#   TRIGGERKV_PLAN_GRID=1          tests/sim/test_plan.py tries all 30 plans of its grid (minutes), not 3

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
py := .venv/bin/python

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-zA-Z%-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## system packages, .venv, the C core; does only what is missing
	@PYTHON='$(PYTHON)' tools/setup.sh

.PHONY: demo
demo: setup-engines ## puts blocks by a flag store and reads them back; then a chat that continues in another process
	@.venv/bin/kvstore demo $(DEMO_ARGS)
	@.venv-engines/bin/python -m kvstore chat

.PHONY: test
test: setup etcd ## all tests, four parts at a time; with PYTEST_ARGS one pytest with these
	@tools/test.sh $(PYTEST_ARGS)

.PHONY: setup-engines
setup-engines: setup ## .venv-engines: vLLM for CPUs, transformers, torch (2.4 GB), for the engines' tests
	@tools/setup_engines.sh

.PHONY: test-engines
test-engines: setup-engines etcd ## tests/engines: real engines with our node beside them, in two parts (minutes)
	@$(if $(PYTEST_ARGS),.venv-engines/bin/python -m pytest tests/engines $(PYTEST_ARGS),tools/test.sh engines)

.PHONY: test-gpu
test-gpu: setup ## tests/gpu, on a machine with an NVIDIA GPU: order, graphs, exact bytes, latency, bandwidth; fails without one
	@tools/test_gpu.sh $(PYTEST_ARGS)

.PHONY: test-hosts
test-hosts: setup-engines etcd ## tests/hosts: network namespaces as hosts, behind firewalls, with the commands of deploy/, and vLLM (minutes)
	@tools/test_hosts.sh $(PYTEST_ARGS)

.PHONY: test-cluster
test-cluster: setup etcd ## clusters in their long form: 300 rounds of failures between hosts, 300 of nodes that die or hang (two hours)
	@TRIGGERKV_CHAOS_ROUNDS=$(or $(TRIGGERKV_CHAOS_ROUNDS),300) TRIGGERKV_HOSTS_LIMIT_S=14400 tools/test_hosts.sh -k chaos -rA $(PYTEST_ARGS)
	@TRIGGERKV_CLUSTER_ROUNDS=$(or $(TRIGGERKV_CLUSTER_ROUNDS),300) $(py) -m pytest tests/cluster $(PYTEST_ARGS)

.PHONY: etcd
etcd: ## .cache/etcd, out of Debian's package (20 MB), for tests/cluster
	@tools/etcd.sh

.PHONY: browser
browser: ## .cache/browser: a headless Chromium, out of Debian's packages (100 MB), for the tests of the page and of the docs' search
	@tools/browser.sh

.PHONY: promtool
promtool: ## .cache/promtool, out of Debian's package (48 MB), for the tests of the alerts
	@tools/promtool.sh

.PHONY: grpc-cpp
grpc-cpp: ## .cache/grpc-cpp: gRPC for C++ and protoc, out of Debian's packages (15 MB), for the test of examples/cpp
	@tools/grpc_cpp.sh

.PHONY: peers
peers: ## .cache/peers: Redis and hiredis, out of Debian's packages (8 MB), for bench-peers
	@tools/peers.sh

.PHONY: test-hostile
test-hostile: setup ## tests/hostile: attacks with one tenant's token or none, beside a well-behaved neighbour (minutes)
	@$(if $(PYTEST_ARGS),$(py) -m pytest tests/hostile $(PYTEST_ARGS),tools/test.sh hostile)

.PHONY: test-keyring
test-keyring: setup ## tests/sealing: a keyring interrupted at each step, in many more ways (minutes)
	@TRIGGERKV_KEYRING_ENDS=$(or $(TRIGGERKV_KEYRING_ENDS),500) $(py) -m pytest tests/sealing $(PYTEST_ARGS)

.PHONY: crash
crash: setup ## the long form: 20,000 runs on a simulated drive that loses unflushed data, 1,000 SIGKILLs at the worst moments
	@TRIGGERKV_CRASH_SEEDS=$(or $(TRIGGERKV_CRASH_SEEDS),20000) $(py) -m pytest tests/storage/test_crashes.py $(PYTEST_ARGS)
	@TRIGGERKV_INDEX_CASES=20000 TRIGGERKV_LANE_SEEDS=2000 $(py) -m pytest tests/storage/test_index_damage.py tests/storage/test_lane.py $(PYTEST_ARGS)
	@TRIGGERKV_RANDOM_EXAMPLES=1 TRIGGERKV_MACHINE_EXAMPLES=$(or $(TRIGGERKV_MACHINE_EXAMPLES),10000) $(py) -m pytest tests/storage/test_state_machine.py $(PYTEST_ARGS) --timeout 7200
	@TRIGGERKV_KILL_ROUNDS=$(or $(TRIGGERKV_KILL_ROUNDS),1000) $(py) -m pytest tests/crash $(PYTEST_ARGS)
	@TRIGGERKV_CASSINI_MODES=1 $(py) -m pytest tests/conformance/test_cassini.py $(PYTEST_ARGS)

.PHONY: soak
soak: setup ## an hour of puts into a drive that is too small: exact bytes, and memory that stays bounded
	@TRIGGERKV_SOAK_S=$(or $(TRIGGERKV_SOAK_S),3600) $(py) -m pytest tests/crash/test_soak.py $(PYTEST_ARGS)

.PHONY: mixed
mixed: setup ## the long form: 1,000 histories of clients that use the same keys in every way at once, with kills and stops (hours)
	@TRIGGERKV_MIXED_ROUNDS=$(or $(TRIGGERKV_MIXED_ROUNDS),100) $(py) -m pytest tests/mixed $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: setup ## 10,000,000 calls into the desk and as many puts to the receiver under libFuzzer, 100,000 inputs of each Python parser under atheris (long)
	@tools/fuzz.sh $(FUZZ_RUNS)

.PHONY: mutants
mutants: setup setup-engines ## plants the bugs of tools/mutants/ one by one: each must make a test fail (minutes)
	@$(py) -m tools.mutants $(MUTANTS)

.PHONY: sanitize
sanitize: setup ## the C core's tests under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer
	@tools/sanitize.sh address
	@tools/sanitize.sh thread

.PHONY: check
check: setup ## ruff, its formatter, mypy --strict
	@$(py) -m ruff check .
	@$(py) -m ruff format --check .
	@$(py) -m mypy

.PHONY: lint-fix
lint-fix: setup ## fix and format what ruff can
	@$(py) -m ruff check --fix .
	@$(py) -m ruff format .

.PHONY: bench
bench: setup ## every benchmark; results in build/bench/
	-@tools/peers.sh
	@$(py) -m benchmarks all

bench-%: setup ## one benchmark: benchmarks/bench_NAME.py
	@$(py) -m benchmarks $*

.PHONY: bench-peers
bench-peers: setup peers ## triggerkv beside Redis, the bare fabric and the bare drive, in one run (six minutes)
	@$(py) -m benchmarks peers

.PHONY: bench-engines
bench-engines: setup-engines ## a real engine: time to first token, computed, cached and from our node; the cost of a step
	@.venv-engines/bin/python -m benchmarks engines
	@.venv-engines/bin/python -m benchmarks steps

.PHONY: proto
proto: setup ## generate kvstore/wire/*_pb2* from proto/
	@$(py) tools/generate_wire.py

.PHONY: api
api: setup ## generate docs/api.md from the docstrings
	@$(py) -m tools.generate_api

.PHONY: docs
docs: setup ## build/site: the documentation, for a browser without a network
	@$(py) -m tools.docs_site

.PHONY: wheel
wheel: setup ## dist/triggerkv-*-cp311-abi3-linux_*.whl: both commands in one wheel, for machines like this one
	@rm -rf build/lib* build/bdist* build/temp*
	@LDFLAGS=-s $(py) -m pip wheel --quiet --no-build-isolation --no-deps --no-index --wheel-dir dist .
	@ls -t dist/triggerkv-*.whl | head -1 | xargs stat -c '%n  %s bytes'

.PHONY: release
release: setup ## dist/: three manylinux wheels below 1 MiB, triggerkv, triggerkv-engines and triggerkv-sim, and their contents as CycloneDX (needs a package index)
	@$(py) -m tools.release

.PHONY: test-ends
test-ends: release ## the wheels with the oldest and the newest dependencies, on each installed Python, or on $(PYTHONS) (minutes)
	@tools/test_ends.sh $(PYTHONS)

.PHONY: test-ends-short
test-ends-short: wheel ## its short form, a new user's first steps, on the Python of .venv or on $(PYTHONS) (two minutes)
	@tools/test_ends.sh --short $(PYTHONS)

.PHONY: clean
clean: ## remove .venv and all build outputs
	rm -rf .venv .venv-engines .cache build dist *.egg-info nic_offload/*.so nic_offload/_core.c kvstore/storage/*.so kvstore/storage/_uring.c kvstore/storage/keep/*.so kvstore/storage/keep/_keep.c
	rm -f sim/replay/*.so sim/replay/_events.c
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
