#!/usr/bin/env bash
# All tests, in three parts beside each other: many wait for other processes, and leave the cores to the others.
#
# What always holds: each test runs once, in one of the parts; the exit status is 0 only if each has passed. A test
# that failed beside the others is named and run again when all parts have ended, because some of them measure time and
# the others took it; it counts as passed if it passes then. A bug that depends on nothing fails twice.
#
# What it doesn't do: choose tests. With arguments it hands them to one pytest and does nothing else.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py=.venv/bin/python
# Hundreds of processes are started, and each would compile every module anew: half of what its start costs.
unset PYTHONDONTWRITEBYTECODE
if (($#)); then exec "$py" -m pytest "$@"; fi

parts=(service fabric rest)
declare -A paths=([service]="tests/client tests/node" [fabric]="tests/conformance tests/crash tests/nic_offload")
paths[rest]=$(printf -- '--ignore=%s ' ${paths[service]} ${paths[fabric]})

part() { # its paths are words, hence no quotes
  "$py" -m pytest ${paths[$1]} -o cache_dir=".cache/pytest-$1" "${@:2}"
}

mkdir -p .cache
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

# 1: tests failed. Anything else that is not 0 is pytest's own failure, and no test is to blame.
again() {
  (($1 == 1)) || return "$1"
  printf '\nSome failed beside the others; they are run again, alone.\n\n'
  part "$2" --last-failed --last-failed-no-failures none
}
status=0
for at in "${!parts[@]}"; do
  again "${ended[$at]}" "${parts[$at]}" || status=$?
done
exit $status
