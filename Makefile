# Everything a user or developer runs. `make` alone lists the verbs; .ci/run calls check and test.
#   PYTHON=python3.12 make demo      another interpreter (3.11 or newer)
#   make test ARGS="tests/kvtransfer -k reserve"
#   PIP_INDEX_URL, PIP_FIND_LINKS...  are pip's own and reach it: with a CPU build of torch among them, that one is taken

PYTHON ?= $(or $(shell command -v python3.11),python3)
ARGS   ?=
BIN    := .venv/bin
PROTOS := $(wildcard proto/twinpool/v1/*.proto)
BUILD  := pyproject.toml $(wildcard setup.py engine/ops/csrc/* kvtransfer/csrc/*)

.PHONY: help demo test test-slow test-net check bench proto compose

help:
	@echo "make demo      install into .venv, fetch the default model, start one router, one prefill and one decode worker, ask a question"
	@echo "make test      install the test dependencies too, run all tests (ARGS= goes to pytest)"
	@echo "make test-slow the tests that take long or much memory, which make test leaves out"
	@echo "make test-net  the tests over an emulated link between network namespaces, with the scripts in the folder TWINPOOL_RIG"
	@echo "make check     ruff, ruff format, mypy, import rules, generated stubs in sync with proto/"
	@echo "make bench     quality of INT8 KV, kernels, the engine alone and step by step, transfer, a short online run against two local workers"
	@echo "make proto     regenerate twinpool/v1 from proto/"
	@echo "make compose   build the image, bring the stack up with docker compose, scale it, break it, take it down"

demo: .venv/.run
	@$(BIN)/twinpool demo

test: .venv/.dev
	@echo "running the tests: real processes on 127.0.0.1, some minutes on two cores"
	@$(BIN)/python -m pytest $(ARGS)

test-slow: .venv/.dev
	@$(BIN)/python -m pytest -m slow $(ARGS)

test-net: .venv/.dev
	@$(BIN)/python -m pytest tests/net -rs $(ARGS)

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory proto
	git diff --exit-code -- twinpool/v1

bench: .venv/.run
	$(BIN)/python -m bench.quality
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.moe
	$(BIN)/python -m bench.offline --quick
	$(BIN)/python -m bench.ablation --quick
	$(BIN)/python -m bench.transfer --seconds 10
	$(BIN)/python -m bench.online --local --rate 0.5 --requests 20 --mix 70:30

proto: .venv/.dev
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

compose:
	@./compose/check.sh

.venv/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install it (Debian, Ubuntu: apt-get install python3.11 python3.11-venv) or say PYTHON=... (3.11 or newer)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: say PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments (Debian, Ubuntu: apt-get install python3.11-venv)" >&2; exit 1; }
	@for library in libibverbs libnuma; do /sbin/ldconfig -p 2>/dev/null | grep $$library.so.1 >/dev/null || echo "no $$library: the tests of Mooncake are left out (Debian, Ubuntu: apt-get install libibverbs1 libnuma1)" >&2; done
	@command -v g++ >/dev/null || echo "no g++: the CPU kernels are not built and the slow reference is used (Debian, Ubuntu: apt-get install g++)" >&2
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

# Two stamps in one environment: what running needs, and what developing needs on top.
.venv/.run: $(BUILD) | .venv/bin/python
	@echo "installing twinpool and its dependencies into .venv (torch is large: minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/.dev: $(BUILD) | .venv/bin/python
	@echo "installing twinpool, its dependencies and the test tools into .venv (torch is large: minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch .venv/.run $@
