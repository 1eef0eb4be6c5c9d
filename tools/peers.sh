#!/usr/bin/env bash
# Fetches Redis and hiredis, beside which `make bench-peers` measures us, out of Debian's packages into .cache/peers; 8 MB of it stay.
#
# What always holds: nothing is installed, and what is there already is not fetched again.
# What it doesn't do: work where there is no apt. A Redis and a hiredis that are installed will do:
# apt-get install redis-server libhiredis-dev
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -e .cache/peers/usr/bin/redis-server ]] && exit
if command -v redis-server >/dev/null && [[ -e /usr/include/hiredis/hiredis.h ]]; then exit; fi
tools/debian.sh .cache/peers "Redis could not be fetched; install it yourself: apt-get install redis-server libhiredis-dev" \
  redis-server redis-tools libhiredis-dev libhiredis0.14 libjemalloc2 liblzf1 liblua5.1-0 lua-cjson lua-bitop libatomic1
