#!/usr/bin/env bash
# Fetches a headless Chromium, for the tests of the node's page and of the docs site's search, from Debian's packages into
# .cache/browser: 100 MB, which take 340 MB.
#
# What always holds: nothing is installed, and existing files are not fetched again. Without apt it reports that and
# succeeds, and these tests are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -d .cache/browser ]] && exit
for browser in chromium chromium-browser google-chrome; do
  if command -v "$browser" >/dev/null; then exit; fi
done
if ! command -v apt-get >/dev/null; then
  echo "tests of pages are skipped; there is no Chromium, and no apt-get to fetch it"
  exit
fi
# Those that this machine lacks, whatever their versions are called; -s installs nothing.
mapfile -t packages < <(apt-get install -s --no-install-recommends chromium-headless-shell | awk '$1 == "Inst" { print $2 }')
tools/debian.sh .cache/browser "Chromium could not be fetched; install it yourself: apt-get install chromium" \
  "${packages[@]}"
cat >.cache/browser/chromium <<'SH'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
libraries=$(echo "$here"/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH="$libraries:$libraries/pulseaudio"
exec "$here/usr/lib/chromium/chromium-headless-shell" "$@"
SH
chmod +x .cache/browser/chromium
