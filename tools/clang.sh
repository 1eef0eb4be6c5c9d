#!/usr/bin/env bash
# Fetches clang with libFuzzer, for `make fuzz`, from Debian's packages into .cache/clang, which takes 320 MB.
#
# What always holds: nothing is installed, and existing files are not fetched again.
# What it doesn't do: work without apt. An installed clang is enough: apt-get install clang libclang-rt-14-dev
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -e .cache/clang/usr/bin/clang-14 ]] && exit
if command -v clang >/dev/null || command -v clang-14 >/dev/null; then exit; fi
packages=(
  clang-14 libclang-cpp14 libllvm14 libclang1-14 libclang-common-14-dev libclang-rt-14-dev llvm-14-linker-tools
  libedit2 libbsd0 libmd0 libxml2 libz3-4 libicu72 libtinfo6 libffi8
)
tools/debian.sh .cache/clang "clang could not be fetched; install it yourself: apt-get install clang libclang-rt-14-dev" \
  "${packages[@]}"
