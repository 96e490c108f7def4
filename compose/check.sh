#!/bin/bash
# make compose: builds the image, brings the stack up, asks a question, scales both pools, kills a worker, asks again,
# takes the stack down. Uses whatever `docker compose` is there, in a project and with a port of its own; where no engine
# answers it says so and that is that.
#   KEEP=1 make compose     leaves the stack up
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s s: %s\n' "$SECONDS" "$*"; }

if ! docker info >/dev/null 2>&1 || ! docker compose version >/dev/null 2>&1; then
    say "no Docker engine with Compose v2 answers here: nothing checked (see docker info, docker compose version)"
    exit 0
fi

export COMPOSE_PROJECT_NAME=twinpool-check COMPOSE_FILE=compose/compose.yaml COMPOSE_PROGRESS=quiet
TWINPOOL_CLUSTER_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export TWINPOOL_CLUSTER_KEY TWINPOOL_IMAGE=twinpool:check TWINPOOL_PUBLISH=127.0.0.1:0
export TWINPOOL_PREFILL_MEMORY=128MiB TWINPOOL_DECODE_MEMORY=128MiB TWINPOOL_PREFILL_LIMIT=2g TWINPOOL_DECODE_LIMIT=2g

finish() {
    status=$?
    if [ "$status" != 0 ]; then
        docker compose ps --all || true
        docker compose logs --no-color --tail 30 || true
        say "FAILED: the lines above are the last ones of every container"
    fi
    if [ -z "${KEEP:-}" ]; then
        say "taking the stack down"
        docker compose down --volumes --remove-orphans --timeout 10 >/dev/null 2>&1 || true
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

# A CPU build of torch, from where this machine's pip gets packages (TORCH_INDEX_URL adds an index). Without it the build
# of the image takes what pip finds there.
fetch_torch() {
    local python requirement
    requirement=$(grep -o 'torch==[0-9.]*' pyproject.toml)
    compgen -G "compose/wheels/torch-${requirement#torch==}*.whl" >/dev/null && return
    for python in .venv/bin/python python3.11 python3; do
        "$python" -c 'import pip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || continue
        "$python" -m pip download --quiet --no-deps --retries 1 --dest compose/wheels \
            ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$requirement" && return
    done
    echo "no wheel of $requirement to be had here; the build fetches it"
}

# in_router PROGRAM ARGS...: runs Python with the SDK inside the router's container.
in_router() {
    docker compose exec -T router python - "${@:2}" <<<"$1"
}

# wait_for_pools PREFILL DECODE: until `twinpool pools` shows that many workers ready.
wait_for_pools() {
    in_router '
import sys, time
from twinpool import Client, errors
want, seen, end = [int(n) for n in sys.argv[1:]], None, time.monotonic() + 180
with Client("127.0.0.1:7070", timeout_s=10) as client:
    while seen != want and time.monotonic() < end:
        time.sleep(0.5)
        try:
            ready = [worker.pool for worker in client.pools().workers if worker.state == "ready"]
        except errors.Unavailable:
            continue
        seen = [ready.count("prefill"), ready.count("decode")]
sys.exit(seen != want and f"{want} prefill and decode workers wanted, {seen} ready")
' "$@"
    docker compose exec -T router twinpool pools
}

# Docker's own view of every container that goes on running.
wait_for_health() {
    local end=$((SECONDS + 120))
    while docker compose ps --format '{{.Name}} {{.Health}}' router prefill decode | grep -v ' healthy$'; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 1
    done
}

ask() {
    local answer
    answer=$(docker compose exec -T router twinpool generate --chat --temperature 0 --max-tokens 32 \
        "What is the capital of France?")
    echo "$answer"
    grep -q Paris <<<"$answer"
}

# ask_many PREFILL DECODE: many questions at once; that many workers of each pool must have answered.
ask_many() {
    in_router '
import sys
from concurrent.futures import ThreadPoolExecutor
from twinpool import Client
want = [int(n) for n in sys.argv[1:]]
with Client("127.0.0.1:7070", timeout_s=120) as client, ThreadPoolExecutor(12) as pool:
    def ask(number):
        return client.generate(f"Number {number} is", temperature=0, max_tokens=16, ignore_eos=True).timeline
    timelines = list(pool.map(ask, range(36)))
used = [len({t.prefill_worker for t in timelines}), len({t.decode_worker for t in timelines})]
print(f"{len(timelines)} answers from {used[0]} prefill and {used[1]} decode workers")
sys.exit(used != want and f"wanted {want}")
' "$@"
}

say "building the image"
fetch_torch
docker compose build --quiet

say "one router, one prefill worker, one decode worker"
docker compose up --detach --no-build
wait_for_pools 1 1
ask

say "scaling to two prefill and three decode workers"
docker compose up --detach --no-build --no-recreate --scale prefill=2 --scale decode=3
wait_for_pools 2 3
wait_for_health
ask_many 2 3

say "killing a decode worker and asking at once"
victim=$(docker compose ps --quiet decode | head -n 1)
# From inside, because to the restart policy an end by `docker kill` is no crash. Process 1 is docker's init.
docker exec "$victim" sh -c 'kill -9 $(cat /proc/1/task/1/children)' || true
ask

say "waiting until it is back"
wait_for_pools 2 3
wait_for_health
[ "$(docker inspect --format '{{.RestartCount}}' "$victim")" = 1 ]
ask_many 2 3

say "all is well"
