#!/usr/bin/env bash
# Fetches etcd, on which tests/cluster put real nodes, out of Debian's package into .cache/etcd; 20 MB of it stay.
#
# What always holds: nothing is installed, and what is there already is not fetched again. Where there is neither an etcd
# nor apt it says so and ends well, and the tests that need one are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x .cache/etcd/etcd ]] && exit
if found=$(command -v etcd); then
  mkdir -p .cache/etcd
  ln -sf "$found" .cache/etcd/etcd
  exit
fi
if ! command -v apt-get >/dev/null; then
  echo "tests/cluster: the tests with a real etcd are skipped; there is no etcd, and no apt-get to fetch it"
  exit
fi
tools/debian.sh .cache/etcd-package "etcd could not be fetched; install it yourself: apt-get install etcd-server" etcd-server
rm -rf .cache/etcd
mkdir .cache/etcd
mv .cache/etcd-package/usr/bin/etcd .cache/etcd/etcd
rm -rf .cache/etcd-package
