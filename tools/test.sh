#!/usr/bin/env bash
# All tests, in three parts beside each other: many wait for other processes, and leave the cores to the others.
#
# What always holds: each test runs once, in one of the parts; the exit status is 0 only if each has passed. A failure is a
# failure, with one exception: a test marked `timed` judges how fast this machine was, and the other parts took of that
# speed. If it failed, it is run again alone when all parts have ended, and counts as passed if it passes then. Every
# first failure is listed at the end, whatever became of it.
#
# Each part has half an hour, and attacks that go on for longer have more. What hangs where pytest's own timeout can't end it (in C, or behind the last test) is a
# failure: its part is ended, and this output ends with where each of its threads stood.
#
# `hostile` runs those instead that compare a neighbour's times with and without an attack beside it, one by one: with
# other tests beside them they would say nothing. Only those that count and wait run beside them, and take what CPU
# time they leave. With other arguments it hands them to one pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py=.venv/bin/python
# Hundreds of processes are started, and each would compile every module anew: half of what its start costs.
unset PYTHONDONTWRITEBYTECODE
if (($#)) && [[ $1 != hostile ]]; then exec "$py" -m pytest "$@"; fi

parts=(service fabric rest)
declare -A paths=([service]="tests/client tests/node" [fabric]="tests/bench tests/conformance tests/crash tests/nic_offload tests/sim tests/examples")
paths[rest]=$(printf -- '--ignore=%s ' ${paths[service]} ${paths[fabric]} tests/hostile)
paths[beside]="tests/hostile/test_counts.py tests/hostile/test_many_clients.py"
paths[hostile]="tests/hostile $(printf -- '--ignore=%s ' ${paths[beside]})"
(($# == 0)) || parts=(hostile beside)

part() { # in a process of its own; its paths are words, hence no quotes
  export TRIGGERKV_FAILURES=".cache/failures-$1"
  local limit_s=${PART_S:-1800}
  [[ $1 != hostile && $1 != beside ]] || limit_s=$((limit_s + 120 * ${TRIGGERKV_HOSTILE_S:-0}))
  [[ $1 != beside ]] || renice -n 19 $BASHPID >/dev/null
  exec timeout --foreground --signal=ABRT --kill-after=30 "$limit_s" \
    "$py" -X faulthandler -m pytest ${paths[$1]} -o cache_dir=".cache/pytest-$1"
}
log() { echo ".cache/tests-$1.log"; }

mkdir -p .cache
rm -f .cache/failures-*
running=()
for name in "${parts[@]:1}"; do
  part "$name" >"$(log "$name")" 2>&1 &
  running+=($!)
done
trap 'kill "${running[@]}" 2>/dev/null' EXIT
part "${parts[0]}" 2>&1 | tee "$(log "${parts[0]}")"
ended=("${PIPESTATUS[0]}")
for at in "${!running[@]}"; do
  wait "${running[$at]}"
  ended+=($?)
  cat "$(log "${parts[$at + 1]}")"
done
trap - EXIT

# 1: tests failed, and the list of failures says which. Anything else that is not 0 is pytest's own end, and no test's.
status=0
for code in "${ended[@]}"; do
  ((code <= 1)) || status=$code
done
mapfile -t failures < <(sort -u .cache/failures-* 2>/dev/null) # one that fails in its teardown as well is one
((${#failures[@]})) || for code in "${ended[@]}"; do
  ((code == 0 || status)) || status=$code # a failure that is on no list
done
words=()
for failure in "${failures[@]}"; do
  IFS=$'\t' read -r kind test <<<"$failure"
  if [[ $kind != timed ]]; then
    words+=("$test")
    status=1
  elif "$py" -m pytest -q -p no:cacheprovider "$test"; then
    words+=("$test (timed; passed alone)")
  else
    words+=("$test (timed; failed alone as well)")
    status=1
  fi
done
if ((${#words[@]})); then
  printf '\nFailed in the first run:\n'
  printf '  %s\n' "${words[@]}"
fi
for at in "${!ended[@]}"; do
  ((ended[at] < 124)) && continue # timeout's own statuses, and signals
  printf '\nThe tests of %s did not end by themselves (%s):\n' "${parts[$at]}" "${ended[$at]}"
  tail -n 60 "$(log "${parts[$at]}")"
done
exit $status
