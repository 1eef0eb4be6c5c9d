#!/usr/bin/env bash
# Fetches promtool, with which Prometheus checks its own rules, out of Debian's package into .cache/; 48 MB of it stay.
#
# What always holds: nothing is installed, and a promtool that is there already is not fetched again.
# What it doesn't do: work where there is no apt. Any promtool of the PATH will do for the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -x .cache/promtool ]] && exit
mkdir -p .cache
work=$(mktemp -d -p .cache)
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb .)
mv "$work/usr/bin/promtool" .cache/promtool
