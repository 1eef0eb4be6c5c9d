#!/usr/bin/env bash
# All tests, in two halves beside each other: those in which processes wait for each other, and those that compute.
#
# What always holds: each test runs once, in one of the halves; the exit status is 0 only if each has passed. A test
# that failed beside the others is named and run again when both halves have ended, because some of them measure time and
# the other half took it; it counts as passed if it passes then. A bug that depends on nothing fails twice.
#
# What it doesn't do: choose tests. With arguments it hands them to one pytest and does nothing else.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py=.venv/bin/python
if (($#)); then exec "$py" -m pytest "$@"; fi

waiting=(tests/client tests/conformance tests/crash tests/nic_offload tests/node)
mkdir -p .cache
log=.cache/tests-that-compute.log
"$py" -m pytest "${waiting[@]/#/--ignore=}" -o cache_dir=.cache/pytest-compute >"$log" 2>&1 &
compute=$!
trap 'kill $compute 2>/dev/null' EXIT
"$py" -m pytest "${waiting[@]}" -o cache_dir=.cache/pytest-wait
waited=$?
wait $compute
computed=$?
trap - EXIT
cat "$log"

# 1: tests failed. Anything else that is not 0 is pytest's own failure, and no test is to blame.
again() {
  (($1 == 1)) || return "$1"
  printf '\nSome failed beside the others; they are run again, alone.\n\n'
  "$py" -m pytest --last-failed --last-failed-no-failures none "${@:2}"
}
status=0
again $waited "${waiting[@]}" -o cache_dir=.cache/pytest-wait || status=$?
again $computed "${waiting[@]/#/--ignore=}" -o cache_dir=.cache/pytest-compute || status=$?
exit $status
