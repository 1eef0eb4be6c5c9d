#!/usr/bin/env bash
# Fetches etcd, for real nodes in tests/cluster, from Debian's package into .cache/etcd, which takes 20 MB.
#
# What always holds: nothing is installed, and existing files are not fetched again. With neither etcd nor apt it reports
# that and succeeds, and the tests that need etcd are skipped.
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
