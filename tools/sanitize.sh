#!/bin/bash
# Builds the C cores of the fabric, the store and the simulator with a sanitizer, and runs their tests: address (with
# undefined, the default) or thread. The build is in build/sanitize-NAME; the tree's own extensions stay as they are.
#
#   tools/sanitize.sh [address|thread] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

name=address
if [[ ${1:-} == address || ${1:-} == thread ]]; then
	name=$1
	shift
fi
python=${PYTHON:-.venv/bin/python}
out=build/sanitize-$name

case $name in
address)
	flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
	libraries="libasan.so libubsan.so"
	# Python returns little of the memory that it takes, so leaks are not checked: only use after free and overruns.
	export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1
	export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
	;;
thread)
	flags="-fsanitize=thread"
	libraries="libtsan.so"
	# libfabric and Python are not built with it, so errors inside them are ignored.
	export TSAN_OPTIONS="suppressions=$PWD/tools/tsan.supp ignore_noninstrumented_modules=1 exitcode=66 history_size=4"
	;;
esac

mkdir -p "$out"
cp -r kvstore nic_offload sim tests "$out"/
rm -f "$out"/nic_offload/*.so "$out"/kvstore/storage/keep/*.so "$out"/sim/replay/*.so "$out"/pyproject.toml
cat >"$out/setup.py" <<'SETUP'
from setuptools import setup

built = ("nic_offload", "kvstore/storage/keep", "sim/replay")
setup(name="sanitized", packages=[], cffi_modules=[f"{folder}/_build.py:ffi" for folder in built])
SETUP
(cd "$out" && CFLAGS="$flags -fno-omit-frame-pointer -O1" LDFLAGS="$flags" "$OLDPWD/$python" setup.py -q build_ext --inplace --force)

preload=
for library in $libraries; do
	preload+="$(gcc -print-file-name="$library") "
done
cp pyproject.toml "$out"/
cd "$out"
# The match-action table has no C in it, and the CUDA compilers crash under these libraries. A test of a process
# without memory is none under a sanitizer, which reserves terabytes.
# They also make mlock do nothing, and say that it was done. Their malloc does not say how much is in use.
run=("$OLDPWD/$python" -m pytest tests/sim/test_events.py tests/storage/test_extents.py tests/storage/eviction tests/node/test_hot.py tests/nic_offload tests/conformance --ignore-glob="*test_match*" --ignore-glob="*eviction/test_without_memory*" --deselect tests/nic_offload/test_secret_keys.py::test_keys_are_excluded_from_dumps_and_locked_and_zeros_once_wiped --deselect tests/nic_offload/test_many.py::test_memory_for_queued_work_is_freed_once_nothing_needed_it_between_two_checks --timeout 300 -p no:cacheprovider --capture=sys "$@")
export PYTHONMALLOC=malloc PYTHONPATH=$PWD LD_PRELOAD=${preload% }
if [[ $name == thread ]]; then
	run+=(--ignore-glob="*test_stuck*") # it holds a thread in a signal handler, and this sanitizer puts signals off
	# It starts a shell, which dies of this library as soon as it is loaded.
	run+=(--deselect tests/nic_offload/test_aead.py::test_both_libraries_give_the_same_bytes_and_libcrypto_alone_is_enough)
	exec setarch -R "${run[@]}" # its shadow memory needs addresses where they are expected
fi
exec "${run[@]}"
