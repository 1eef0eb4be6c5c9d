#!/usr/bin/env bash
# Makes this checkout ready to run: system packages, .venv, pinned dependencies, the C core.
#
# What always holds: a completed step is not repeated, whatever was interrupted. Each step's stamp is inside .venv, has a
# hash of everything that the step depends on, and is written last. When all stamps match, neither apt nor pip nor the
# network is used.
#
# What it doesn't do: install a Python or a compiler, or change anything outside this folder except by apt.
#
# Settings: PYTHON=/path/to/python3.11-or-newer (default: python3, then python3.14 ... python3.11 of the PATH).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv

say() { printf 'set-up: %s\n' "$*"; }
die() {
  printf 'set-up: %s\n' "$*" >&2
  exit 1
}

# Two set-ups of one checkout at a time would overwrite each other's files.
mkdir -p "$root/.cache"
exec 9>"$root/.cache/setup.lock"
if command -v flock >/dev/null; then
  flock -w 900 9 || die "another set-up of this checkout has been running for 15 minutes; end it and try again."
fi

# --- 1. the interpreter ---------------------------------------------------------------------------
probe='
import importlib.util as u, os, sys, sysconfig
if sys.version_info < (3, 11): sys.exit(3)
header = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
venv = bool(u.find_spec("venv") and u.find_spec("ensurepip"))
prefix = sys.base_prefix
print(os.path.realpath(sys.executable), "%d.%d.%d" % sys.version_info[:3], int(venv), int(header), prefix, sep="\t")
'
find_python() {
  local name
  if [[ -n ${PYTHON:-} ]]; then
    "$PYTHON" -c "$probe" 2>/dev/null || die "PYTHON=$PYTHON does not run, or is older than Python 3.11; name another one."
    return
  fi
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    command -v "$name" >/dev/null && "$name" -c "$probe" 2>/dev/null && return
  done
  die "no Python 3.11 or newer on the PATH; install one (Debian 12: apt-get install python3) or name it: make PYTHON=/path/to/python3 ..."
}
found=$(find_python)
IFS=$'\t' read -r python python_version has_venv has_headers prefix <<<"$found"

# --- 2. system packages ---------------------------------------------------------------------------
missing=()
if command -v dpkg-query >/dev/null; then
  wanted=(libfabric-dev libfabric-bin liburing-dev libisal2 openssl iproute2 nftables) # the last three for tests
  grep -qw vaes /proc/cpuinfo && wanted+=(libipsec-mb1) # encrypts in half of the time; only for such CPUs
  if [[ $prefix == /usr ]]; then
    ((has_venv)) || wanted+=(python3-venv "python${python_version%.*}-venv")
    ((has_headers)) || wanted+=(python3-dev "libpython${python_version%.*}-dev")
  fi
  # dpkg-query fails as soon as one of the names is unknown; its output is correct nevertheless.
  present=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${wanted[@]}" 2>/dev/null || true)
  for package in "${wanted[@]}"; do
    grep -qx "$package installed" <<<"$present" || missing+=("$package")
  done
else
  for header in rdma/fabric.h liburing.h; do
    printf '#include <%s>\n' "$header" | gcc -E -x c - >/dev/null 2>&1 || missing+=("$header")
  done
  ((${#missing[@]} == 0)) || die "this is not a Debian, and these headers are missing: ${missing[*]}; install libfabric and liburing with their headers."
fi
if [[ $prefix != /usr ]]; then
  ((has_venv)) || die "$python has no venv or ensurepip module, and apt cannot give it one; name another with PYTHON=."
  ((has_headers)) || die "$python has no C headers (Python.h), and apt cannot give it them; name another with PYTHON=."
fi
if ((${#missing[@]})); then
  command -v apt-get >/dev/null || die "these packages are missing and there is no apt-get: ${missing[*]}"
  as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "not root and no sudo here; ask for these packages: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing ${missing[*]} with apt, because they are not on this machine"
  mkdir -p "$root/.cache"
  log=$root/.cache/apt.log
  "${as_root[@]}" apt-get update -qq >"$log" 2>&1 || say "apt-get update failed; trying with the package lists that are here"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >>"$log" 2>&1 || {
    tail -n 15 "$log" >&2
    die "apt could not install ${missing[*]}; the end of its output is above, all of it in .cache/apt.log"
  }
fi
command -v gcc >/dev/null || die "no gcc on the PATH; install it (Debian: apt-get install gcc libc6-dev)"

# --- 3. the venv with its pinned dependencies -----------------------------------------------------
# The root is part of the hash: a venv that was moved or copied names its old place in every script.
hash_of() { sha256sum | cut -d' ' -f1; }
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
deps_hash=$( (printf '%s\n' "$python" "$python_version" "$root" && cat requirements-dev.txt) | hash_of)
deps_stamp=$venv/.stamp-dependencies
if [[ ! -x $venv/bin/python || ! -f $deps_stamp || $(<"$deps_stamp") != "$deps_hash" ]]; then
  if [[ ! -d $venv ]]; then why="there is none yet"
  elif [[ ! -f $deps_stamp ]]; then why="the last set-up did not finish"
  else why="the Python, the folder or requirements-dev.txt changed"; fi
  say "making .venv with Python $python_version, because $why (about half a minute)"
  rm -rf "$venv"
  "$python" -m venv "$venv" || die "$python could not make .venv; its output is above."
  log=$root/.cache/pip.log
  # --no-deps: the list is complete, and a package that is not on it must not come in by itself.
  "$venv/bin/python" -m pip install --no-deps -r requirements-dev.txt >"$log" 2>&1 || {
    tail -n 15 "$log" >&2
    die "pip could not install requirements-dev.txt; the end of its output is above, all of it in .cache/pip.log"
  }
  "$venv/bin/python" -m pip check >>"$log" 2>&1 || {
    tail -n 15 "$log" >&2
    die "the packages in requirements-dev.txt conflict; pip's output is above."
  }
  printf '%s\n' "$deps_hash" >"$deps_stamp"
fi

# --- 4. the project itself, with its C core -------------------------------------------------------
shopt -s nullglob
recipes=(nic_offload/_build.py kvstore/storage/_build.p[y] kvstore/storage/keep/_build.p[y] sim/replay/_build.p[y]) # [y]: only if there is one
sources=(pyproject.toml setup.py "${recipes[@]}" nic_offload/*.[ch] kvstore/storage/*.[ch] kvstore/storage/keep/*.[ch] sim/replay/*.[ch])
inputs=()
for source in "${sources[@]}"; do
  case $source in nic_offload/_core.c | kvstore/storage/_uring.c | kvstore/storage/keep/_keep.c | sim/replay/_events.c) ;; *) inputs+=("$source") ;; esac  # generated
done
build_hash=$( (printf '%s\n' "$deps_hash" && sha256sum "${inputs[@]}") | hash_of)
build_stamp=$venv/.stamp-build
built=(nic_offload/_core*.so kvstore/storage/_uring*.so kvstore/storage/keep/_keep*.so sim/replay/_events*.so)
if ((${#built[@]} < ${#recipes[@]})) || [[ ! -x $venv/bin/kvstore || ! -f $build_stamp || $(<"$build_stamp") != "$build_hash" ]]; then
  if [[ ! -f $build_stamp ]]; then why="it is not in .venv yet"
  elif ((${#built[@]} < ${#recipes[@]})); then why="a built library is gone"
  else why="its C sources or pyproject.toml changed"; fi
  say "building triggerkv into .venv, because $why"
  rm -f "$build_stamp"
  log=$root/.cache/build.log
  "$venv/bin/python" -m pip install --no-build-isolation --no-deps --no-index -e . >"$log" 2>&1 || {
    tail -n 25 "$log" >&2
    die "the build failed; the end of the compiler's output is above, all of it in .cache/build.log"
  }
  printf '%s\n' "$build_hash" >"$build_stamp"
fi
