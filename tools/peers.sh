#!/usr/bin/env bash
# Fetches Redis and hiredis, for `make bench-peers`, from Debian's packages into .cache/peers, which takes 8 MB.
#
# What always holds: nothing is installed, and existing files are not fetched again.
# What it doesn't do: work without apt. An installed Redis and hiredis are enough:
# apt-get install redis-server libhiredis-dev
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -e .cache/peers/usr/bin/redis-server ]] && exit
if command -v redis-server >/dev/null && [[ -e /usr/include/hiredis/hiredis.h ]]; then exit; fi
tools/debian.sh .cache/peers "Redis could not be fetched; install it yourself: apt-get install redis-server libhiredis-dev" \
  redis-server redis-tools libhiredis-dev libhiredis0.14 libjemalloc2 liblzf1 liblua5.1-0 lua-cjson lua-bitop libatomic1
