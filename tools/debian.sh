#!/usr/bin/env bash
# Unpacks Debian's packages into a folder.
#
#   tools/debian.sh FOLDER "What could not be done; what to do instead" PACKAGE...
#
# What always holds: nothing is installed; the folder is complete, or doesn't exist.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$1 instead=$2
shift 2
mkdir -p .cache
work=$(mktemp -d -p .cache)
trap 'rm -rf "$work"' EXIT
(
  cd "$work"
  if (($# == 0)) || ! apt-get download -qq "$@" 2>apt.log; then
    [[ ! -e apt.log ]] || cat apt.log >&2
    printf '%s\n' "$instead" >&2
    exit 1
  fi
  for package in *.deb; do dpkg -x "$package" root; done
)
rm -rf "$folder"
mv "$work/root" "$folder"
