#!/usr/bin/env bash
# Fuzzes what reads what others wrote, with a signal of the code that an input reaches: the desk in C under libFuzzer, with
# AddressSanitizer and UndefinedBehaviorSanitizer, the parsers in Python under atheris.
#
#   tools/fuzz.sh [C executions] [executions of each Python parser]
#
# What always holds: a find ends it with the input's path; inputs that reached something new stay in .cache/fuzz, and are
# where the next run begins. What it doesn't do: install a compiler: apt-get install clang libclang-rt-14-dev
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
c_runs=${1:-10000000} python_runs=${2:-100000}
out=.cache/fuzz
mkdir -p "$out"

clang=$(command -v clang clang-14 | head -1 || true)
if [[ -z $clang ]]; then
  printf 'The desk needs clang with libFuzzer: apt-get install clang libclang-rt-14-dev\n' >&2
  exit 1
fi
"$clang" -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -o "$out/desk-fuzzer" \
  tests/fuzz/desk.c nic_offload/{desk,desk_where,shelf,names,seal,siphash,crc32c}.c -lpthread
mkdir -p "$out/desk"
"$out/desk-fuzzer" -runs="$c_runs" -max_len=2200 -verbosity=0 -print_final_stats=1 -artifact_prefix="$out/find-desk-" "$out/desk"

atheris=.cache/atheris
[[ -e $atheris/atheris ]] || .venv/bin/python -m pip install --quiet --target "$atheris" atheris==3.0.0
for name in fabric_calls grpc_fields http tenants sessions traces records encrypted_records index; do
  mkdir -p "$out/$name"
  printf '%s\n' "$name"
  PYTHONPATH=$atheris .venv/bin/python -m tests.fuzz "$name" "$out/$name" -runs="$python_runs" -max_len=4096 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="$out/find-$name-"
done
