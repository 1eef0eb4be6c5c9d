#!/usr/bin/env bash
# All tests, in three parts beside each other: many wait for other processes, and leave the cores to the others.
#
# What always holds: each test runs once, in one of the parts; the exit status is 0 only if each has passed. A failure is a
# failure, with one exception: a test marked `timed` judges how fast this machine was, and the other parts took of that
# speed. If it failed, it is run again alone when all parts have ended, and counts as passed if it passes then. Every
# first failure is listed at the end, whatever became of it.
#
# `hostile` runs those instead that compare a neighbour's times with and without an attack beside it, one by one: with
# other tests beside them they would say nothing. With other arguments it hands them to one pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py=.venv/bin/python
# Hundreds of processes are started, and each would compile every module anew: half of what its start costs.
unset PYTHONDONTWRITEBYTECODE
if (($#)) && [[ $1 != hostile ]]; then exec "$py" -m pytest "$@"; fi

parts=(service fabric rest)
declare -A paths=([service]="tests/client tests/node" [fabric]="tests/conformance tests/crash tests/nic_offload")
paths[rest]=$(printf -- '--ignore=%s ' ${paths[service]} ${paths[fabric]} tests/hostile)
paths[hostile]=tests/hostile
(($# == 0)) || parts=(hostile)

part() { # its paths are words, hence no quotes
  TRIGGERKV_FAILURES=".cache/failures-$1" "$py" -m pytest ${paths[$1]} -o cache_dir=".cache/pytest-$1"
}

mkdir -p .cache
rm -f .cache/failures-*
running=()
for name in "${parts[@]:1}"; do
  part "$name" >".cache/tests-$name.log" 2>&1 &
  running+=($!)
done
trap 'kill "${running[@]}" 2>/dev/null' EXIT
part "${parts[0]}"
ended=($?)
for at in "${!running[@]}"; do
  wait "${running[$at]}"
  ended+=($?)
  cat ".cache/tests-${parts[$at + 1]}.log"
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
exit $status
