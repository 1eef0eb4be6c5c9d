#!/usr/bin/env bash
# Fetches gRPC for C++ and protoc, to build examples/cpp, from Debian's packages into .cache/grpc-cpp: 15 MB, which
# take 35 MB.
#
# What always holds: nothing is installed, and existing files are not fetched again. Without apt it reports that and
# succeeds, and the test of the example is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -d .cache/grpc-cpp ]] && exit
if command -v grpc_cpp_plugin >/dev/null && pkg-config --exists grpc++ 2>/dev/null; then exit; fi
if ! command -v apt-get >/dev/null; then
  echo "examples/cpp: its test is skipped; there is no gRPC for C++, and no apt-get to fetch it"
  exit
fi
wanted=(libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev)
# Those that this machine lacks, whatever their versions are called; -s installs nothing.
mapfile -t packages < <(apt-get install -s --no-install-recommends "${wanted[@]}" | awk '$1 == "Inst" { print $2 }')
tools/debian.sh .cache/grpc-cpp "gRPC for C++ could not be fetched; install it yourself: apt-get install ${wanted[*]}" \
  "${packages[@]}"
find .cache/grpc-cpp -name '*.a' -size +512k -delete # the shared ones do
