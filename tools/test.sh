#!/usr/bin/env bash
# All tests, in parts, four at a time on two cores: many tests wait for other processes, or for a drive, and leave the
# cores to the others. The next part begins when one has ended. The longest come first and the shortest last, so all cores
# have work until shortly before the end.
#
# What always holds: each test runs once, in one of the parts; the exit status is 0 only if all have passed. All failures
# are listed at the end.
#
# Each part has half an hour; long attacks have more. A test that hangs where pytest's own timeout can't end it (in C, or
# after the last test) is a failure: its part is ended, and the output ends with the stack of each of its threads.
#
# `hostile` runs instead the tests that compare a neighbour's times with and without an attack, one by one: other tests
# beside them would spoil the comparison. Those that only count and wait run after them. `engines` runs the tests of real
# engines, in two parts at the same time. Other arguments are passed to one pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
py=.venv/bin/python
# Hundreds of processes are started, and each would compile all modules again: half of the cost of its start.
unset PYTHONDONTWRITEBYTECODE
# Each that imports numpy would start threads for matrices, which spin for a while: a third of the cost of that import.
export OPENBLAS_NUM_THREADS=1
# Debian's libfabric reads all symbols of the kernel, twice, in each process that opens a fabric: a tenth of a second, for
# NICs that tests don't use. Where it is allowed (root), tests have a mount namespace in which there are none.
without_symbols=(unshare --mount -- sh -c 'mount --bind /dev/null /proc/kallsyms && exec "$@"' sh)
"${without_symbols[@]}" true 2>/dev/null || without_symbols=()
if (($#)) && [[ $1 != hostile && $1 != engines ]]; then exec "$py" -m pytest "$@"; fi

beside=4
parts=(client cluster node nic_offload storage conformance programs sim)
declare -A paths=([programs]="tests/benchmarks tests/crash tests/examples")
for name in "${parts[@]}"; do paths[$name]=${paths[$name]:-tests/$name}; done
paths[rest]=$(for name in "${parts[@]}"; do printf -- '--ignore=%s ' ${paths[$name]}; done)" --ignore=tests/hostile"
paths[sessions]="tests/cluster/test_session*.py"
paths[cluster]="tests/cluster --ignore-glob=*/test_session*.py"
parts=("${parts[@]:0:2}" rest sessions "${parts[@]:2}")
paths[counts]="tests/hostile/test_counts.py tests/hostile/test_many_clients.py"
paths[hostile]="tests/hostile $(printf -- '--ignore=%s ' ${paths[counts]})"
paths[vllm]="tests/engines/test_vllm*.py"
paths[adapters]="tests/engines --ignore-glob=*/test_vllm*.py"
case ${1:-} in
  hostile) parts=(hostile counts) beside=1 ;;
  engines)
    parts=(adapters vllm)
    py=.venv-engines/bin/python
    export OMP_NUM_THREADS=1 # torch's threads wait for each other by spinning, and the cores are taken
    ;;
esac

part() { # in a process of its own; its paths are words, hence no quotes
  export TRIGGERKV_FAILURES=".cache/failures-$1"
  local limit_s=${PART_S:-1800}
  [[ $1 != hostile && $1 != counts ]] || limit_s=$((limit_s + 120 * ${TRIGGERKV_HOSTILE_S:-0}))
  exec timeout --foreground --signal=ABRT --kill-after=30 "$limit_s" \
    "${without_symbols[@]}" "$py" -X faulthandler -m pytest ${paths[$1]} -o cache_dir=".cache/pytest-$1"
}
log() { echo ".cache/tests-$1.log"; }

mkdir -p .cache
rm -f .cache/failures-*
declare -A part_of=() ended=()
trap 'kill "${!part_of[@]}" 2>/dev/null' EXIT
end_one() {
  local pid code=0
  wait -n -p pid "${!part_of[@]}" || code=$?
  local name=${part_of[$pid]}
  unset "part_of[$pid]"
  ended[$name]=$code
  [[ $name == "${parts[0]}" ]] || cat "$(log "$name")"
}
for name in "${parts[@]}"; do
  ((${#part_of[@]} < beside)) || end_one
  : >"$(log "$name")" # tail is to find it
  part "$name" >"$(log "$name")" 2>&1 &
  part_of[$!]=$name
  if [[ $name == "${parts[0]}" ]]; then # as it goes on; the others when they have ended
    tail -n +1 -f --pid=$! "$(log "$name")" &
    live=$!
  fi
done
while ((${#part_of[@]})); do end_one; done
wait "$live"
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
if ((${#failures[@]})); then
  ((status)) || status=1
  printf '\nFailed:\n'
  printf '  %s\n' "${failures[@]}"
fi
for name in "${parts[@]}"; do
  ((ended[$name] < 124)) && continue # timeout's own statuses, and signals
  printf '\nThe tests of %s did not end by themselves (%s):\n' "$name" "${ended[$name]}"
  tail -n 60 "$(log "$name")"
done
exit $status
