#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# Starts vLLM with KV cache events, follows them with kv_events_subscriber.py, sends
# two completions, and prints both answers and the events. Ends what it started, and
# nothing else, however it ends. The exit status is 0 only if all of that worked.
set -euo pipefail

HF_MODEL_NAME=${HF_MODEL_NAME:-meta-llama/Meta-Llama-3.1-8B-Instruct}
PORT=${PORT:-8100}
DEFAULT_ARGS="--max-model-len 100 --enforce-eager --gpu-memory-utilization 0.8"
VLLM_ARGS=${VLLM_ARGS-$DEFAULT_ARGS --trust-remote-code} # quoted as for a shell
KV_EVENTS_PORT=${KV_EVENTS_PORT:-5557}
KV_REPLAY_PORT=${KV_REPLAY_PORT:-5558}
STARTUP_TIMEOUT=${STARTUP_TIMEOUT:-1200} # seconds; there may be a model to download

REQUEST_TIMEOUT=300 # seconds for one completion
EVENTS_TIMEOUT=30   # seconds until the events are here
QUIET=1             # seconds without a new event, after which there are no more
GRACE=7             # seconds between TERM and KILL
LOG_TAIL=40         # lines of a log that are shown when something fails

HERE=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")
SUBSCRIBER=$HERE/kv_events_subscriber.py
SERVER=http://127.0.0.1:$PORT
WORK=$(mktemp -d)
STARTED=()

# --- Whatever is started is ended -----------------------------------------------------

# In a process group of its own: its children end with it, and Ctrl-C does not reach it
# before this script. Output goes to the file $1. Leaves the id in $!.
start() {
    set -m
    "${@:2}" >"$1" 2>&1 </dev/null &
    set +m
    STARTED+=($!)
}

# Waits for the last one started.
finish() {
    local status=0
    wait "${STARTED[-1]}" || status=$?
    unset 'STARTED[-1]'
    return "$status"
}

end_all() {
    local status=$? group deadline=$((SECONDS + GRACE))
    trap '' INT TERM HUP
    for group in ${STARTED[@]+"${STARTED[@]}"}; do
        kill -TERM -- "-$group" 2>/dev/null || true
    done
    for group in ${STARTED[@]+"${STARTED[@]}"}; do
        while kill -0 -- "-$group" 2>/dev/null && ((SECONDS < deadline)); do
            sleep 0.1
        done
        kill -KILL -- "-$group" 2>/dev/null || true
        wait "$group" 2>/dev/null || true
    done
    rm -rf -- "$WORK"
    exit "$status"
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

fail() {
    if [[ -s ${2:-} ]]; then
        echo "The end of the log of $(basename -- "$2" .log):" >&2
        tail -n "$LOG_TAIL" -- "$2" >&2
    fi
    echo "kv_events.sh: $1" >&2
    exit 1
}

# --- Before anything is started -------------------------------------------------------

for tool in vllm curl python3; do
    command -v "$tool" >/dev/null || fail "$tool is not installed, or not on PATH"
done
python3 "$SUBSCRIBER" --help >"$WORK/subscriber.log" 2>&1 ||
    fail "the subscriber does not run" "$WORK/subscriber.log"
for port in "$PORT" "$KV_EVENTS_PORT" "$KV_REPLAY_PORT"; do
    if (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        fail "port $port is taken (see PORT, KV_EVENTS_PORT, KV_REPLAY_PORT)"
    fi
done

# --- The engine -----------------------------------------------------------------------

# A PUB endpoint with a * is one that vLLM binds; to any other it connects.
EVENTS_CONFIG='{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "kv-events",
    "endpoint": "tcp://*:'$KV_EVENTS_PORT'",
    "replay_endpoint": "tcp://127.0.0.1:'$KV_REPLAY_PORT'"}'
xargs -r printf '%s\n' <<<"$VLLM_ARGS" >"$WORK/args" || fail "VLLM_ARGS: bad quotes"
mapfile -t ARGS <"$WORK/args"

echo "Starting vLLM with $HF_MODEL_NAME on port $PORT; this can take minutes."
start "$WORK/vllm.log" vllm serve "$HF_MODEL_NAME" --host 127.0.0.1 --port "$PORT" \
    --kv-events-config "$EVENTS_CONFIG" "${ARGS[@]}"
ENGINE=$!

deadline=$((SECONDS + STARTUP_TIMEOUT))
until curl -fs --noproxy '*' --max-time 2 -o /dev/null "$SERVER/health"; do
    kill -0 "$ENGINE" 2>/dev/null || fail "vLLM ended while it started" "$WORK/vllm.log"
    ((SECONDS < deadline)) || fail "not ready in $STARTUP_TIMEOUT s" "$WORK/vllm.log"
    sleep 0.5
done

# --- Events and completions -----------------------------------------------------------

# Nothing is missed though it starts now: it asks for a replay of what was before.
start "$WORK/subscriber.log" python3 "$SUBSCRIBER" --topic kv-events \
    --endpoint "tcp://127.0.0.1:$KV_EVENTS_PORT" \
    --replay-endpoint "tcp://127.0.0.1:$KV_REPLAY_PORT"
FOLLOWER=$!

complete() {
    local body model
    model=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$HF_MODEL_NAME")
    body='{"model": '$model', "prompt": "'$1'", "max_tokens": 80, "temperature": 0}'
    start "$WORK/status" curl -sS --noproxy '*' --max-time "$REQUEST_TIMEOUT" \
        -o "$WORK/answer" -w '%{http_code}' -H 'Content-Type: application/json' \
        -d "$body" "$SERVER/v1/completions"
    finish || fail "no completion: $(cat "$WORK/status")" "$WORK/vllm.log"
    [[ $(cat "$WORK/status") == 200 ]] ||
        fail "no completion: $(cat "$WORK/status" "$WORK/answer")" "$WORK/vllm.log"
    echo "Prompt: $1"
    echo "Answer: $(cat "$WORK/answer")"
}
complete "The three largest cities of France are"
complete "A key-value cache makes a language model faster, because"

# Until there are events, and for a while no more of them.
lines=-1 deadline=$((SECONDS + EVENTS_TIMEOUT))
until grep -q BlockStored "$WORK/subscriber.log" &&
    ((lines == $(wc -l <"$WORK/subscriber.log"))); do
    kill -0 "$FOLLOWER" 2>/dev/null || fail "the subscriber ended" "$WORK/subscriber.log"
    ((SECONDS < deadline)) || fail "no events came in time" "$WORK/subscriber.log"
    lines=$(wc -l <"$WORK/subscriber.log")
    sleep "$QUIET"
done
kill -TERM "$FOLLOWER"
finish || fail "the subscriber failed" "$WORK/subscriber.log"
echo "Events:"
cat "$WORK/subscriber.log"
