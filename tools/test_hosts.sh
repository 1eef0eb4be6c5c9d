#!/usr/bin/env bash
# tests/hosts in a network and mount namespace of its own: bridges, hosts and mounts vanish with its last process.
#
# What always holds: if namespaces, veth devices or nftables are not available, it says which and succeeds; a failed test
# is a failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sandbox=(unshare --net --mount --propagation private)
((EUID == 0)) || sandbox=(unshare --user --map-root-user --net --mount --propagation private)
prepare='mount -t tmpfs none /run && mkdir -p /run/netns && ip link set lo up'
probe="$prepare"' && ip netns add trial && ip link add trial0 type veth peer name eth0 netns trial &&
  ip link add wire type bridge && ip netns exec trial nft add table inet trial'

for program in unshare ip nft; do
  command -v "$program" >/dev/null || {
    echo "tests/hosts: skipped, there is no $program (Debian: apt-get install nftables iproute2 util-linux)"
    exit 0
  }
done
if ! why=$("${sandbox[@]}" sh -ec "$probe" 2>&1); then
  echo "tests/hosts: skipped, network namespaces are not allowed here (${why//$'\n'/; })"
  exit 0
fi
TRIGGERKV_HOSTS=1 exec "${sandbox[@]}" sh -ec "$prepare"' && exec "$@"' sandbox \
  timeout --foreground --signal=ABRT --kill-after=30 "${TRIGGERKV_HOSTS_LIMIT_S:-1200}" .venv/bin/python -X faulthandler -m pytest tests/hosts "$@"
