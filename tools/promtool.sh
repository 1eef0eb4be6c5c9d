#!/usr/bin/env bash
# Fetches promtool, Prometheus' checker of rules, from Debian's package into .cache/, which takes 48 MB.
#
# What always holds: nothing is installed, and an existing promtool is not fetched again.
# What it doesn't do: work without apt. Any promtool in the PATH is enough for the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x .cache/promtool ]] && exit
mkdir -p .cache
work=$(mktemp -d -p .cache)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb .)
mv "$work/usr/bin/promtool" .cache/promtool
