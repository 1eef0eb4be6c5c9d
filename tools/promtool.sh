#!/usr/bin/env bash
# Fetches promtool, Prometheus' checker of rules, from Debian's package into .cache/, which takes 48 MB.
#
# What always holds: nothing is installed, and an existing promtool, there or in the PATH, is enough. Without apt it
# reports that and succeeds, and the tests of the alerts are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x .cache/promtool ]] && exit
if command -v promtool >/dev/null; then exit; fi
if ! command -v apt-get >/dev/null; then
  echo "tests of the alerts are skipped; there is no promtool, and no apt-get to fetch it"
  exit
fi
mkdir -p .cache
work=$(mktemp -d -p .cache)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb .)
mv "$work/usr/bin/promtool" .cache/promtool
