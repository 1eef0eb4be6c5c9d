#!/usr/bin/env bash
# Fuzzes parsers of foreign data, guided by coverage: in C the desk (calls) and the receiver (puts) under libFuzzer, with
# AddressSanitizer and UndefinedBehaviorSanitizer, in Python the parsers under atheris.
#
#   tools/fuzz.sh [C executions] [executions of each Python parser]
#
# What always holds: a finding ends it with the input's path; inputs that reached new code stay in .cache/fuzz, where the
# next run begins. What it doesn't do: install a compiler; `tools/clang.sh` unpacks one of Debian's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
c_runs=${1:-10000000} python_runs=${2:-100000}
out=.cache/fuzz
mkdir -p "$out"

tools/clang.sh
unpacked=$PWD/.cache/clang
if [[ -e $unpacked ]]; then
  libraries=$unpacked/usr/lib/llvm-14/lib:$unpacked/usr/lib/x86_64-linux-gnu:$unpacked/lib/x86_64-linux-gnu
  clang=(env "LD_LIBRARY_PATH=$libraries" "$unpacked/usr/lib/llvm-14/bin/clang")
else
  clang=("$(command -v clang clang-14 | head -1)")
fi
fuzz_c() { # what is fuzzed, and the files of it
  local name=$1
  shift
  "${clang[@]}" -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -o "$out/$name-fuzzer" \
    "tests/fuzz/$name.c" "${@/#/nic_offload/}" -lpthread
  mkdir -p "$out/$name"
  "$out/$name-fuzzer" -runs="$c_runs" -max_len=2200 -verbosity=0 -print_final_stats=1 \
    -artifact_prefix="$out/find-$name-" "$out/$name"
}
shared=(directory.c shelf.c names.c seal.c siphash.c crc32c.c)
fuzz_c desk desk.c desk_cold.c desk_log.c desk_where.c "${shared[@]}"
fuzz_c receiver receiver.c receiver_puts.c atomic_words.c "${shared[@]}"

atheris=.cache/atheris
[[ -e $atheris/atheris ]] || .venv/bin/python -m pip install --quiet --target "$atheris" atheris==3.0.0
for name in fabric_calls grpc_fields http tenants sessions traces records encrypted_records index; do
  mkdir -p "$out/$name"
  printf '%s\n' "$name"
  PYTHONPATH=$atheris .venv/bin/python -m tests.fuzz "$name" "$out/$name" -runs="$python_runs" -max_len=4096 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix="$out/find-$name-"
done
