#!/usr/bin/env bash
# The wheels of dist/ with the oldest dependencies that they accept, and with the newest, on each Python from 3.11 that is
# here (on the PATH, of pyenv, or that of .venv). The oldest ones are installed for the oldest Python only: later ones have no wheels.
#
#   tools/test_ends.sh [VERSION...]            of these Pythons only, such as 3.11
#   tools/test_ends.sh --short [VERSION...]    the wheel of make wheel, and in place of tests tools/first_steps.py
#
# What always holds: environments are in .cache/ends and are kept. The demo runs the installed wheel; pytest runs this
# tree's Python files with the environment's dependencies. A Python that is not on the machine is named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
short='' maker=release
wheels=(dist/triggerkv-*manylinux*.whl dist/triggerkv_engines-*manylinux*.whl dist/triggerkv_sim-*manylinux*.whl)
if [[ ${1:-} == --short ]]; then
  shift
  short=short- maker=wheel
  wheels=("$(ls -t dist/triggerkv-*-linux_*.whl 2>/dev/null | head -n 1 || true)") # the last one that was made
fi
for wheel in "${wheels[@]}"; do
  [[ -f $wheel ]] || {
    echo "There is no wheel ${wheel:+$wheel }in dist/; run make $maker." >&2
    exit 1
  }
done
tests=(tests/wire tests/testing/test_local_node.py tests/storage/test_index.py tests/client/test_sessions.py)
mkdir -p .cache/ends

oldest=.cache/ends/oldest.txt # the lower bounds, as constraints
.venv/bin/python - >"$oldest" <<'PYTHON'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for one in project["dependencies"] + project["optional-dependencies"]["otel"]:
    print(re.sub(r">=([\d.]+).*", r"==\1", one))
PYTHON

find_python() {
  local one
  for one in "python$1" "$HOME/.pyenv/versions/$1".*/bin/python "$PWD/.venv/bin/python"; do
    [[ $("$one" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$1" ]] || continue
    printf '%s\n' "$one"
    return
  done
  return 1
}

check() { # version oldest|newest
  local python home=.cache/ends/$short$1-$2 more=(--upgrade)
  python=$(find_python "$1") || {
    echo "Python $1: not here, not tested"
    return
  }
  [[ $2 == newest ]] || more=(--constraint "$oldest")
  [[ -x $home/bin/python ]] || "$python" -m venv "$home"
  if [[ $short ]]; then
    "$home/bin/pip" install --quiet "${more[@]}" "${wheels[0]}"
    "$home/bin/pip" install --quiet --no-deps --force-reinstall "${wheels[0]}"
    "$home/bin/pip" check
    (cd / && "$OLDPWD/$home/bin/python" -I -W error "$OLDPWD/tools/first_steps.py")
    return
  fi
  "$home/bin/pip" install --quiet "${more[@]}" "${wheels[0]}[otel]" "${wheels[@]:1}" pytest pytest-timeout hypothesis crc32c
  "$home/bin/pip" install --quiet --no-deps --force-reinstall "${wheels[@]}"
  "$home/bin/pip" check
  (cd / && "$OLDPWD/$home/bin/kvstore" demo >/dev/null && "$OLDPWD/$home/bin/kvsim" curve >/dev/null)
  "$home/bin/python" -m pytest -q -p no:cacheprovider "${tests[@]}" --ignore tests/wire/test_proto.py
  echo "Python $1 with the $2 dependencies: passed"
}

versions=("$@")
if (($# == 0)) && [[ $short ]]; then
  versions=("$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')") # which is here for certain
elif (($# == 0)); then
  versions=(3.11 3.12 3.13 3.14)
fi
for version in "${versions[@]}"; do
  [[ $version != 3.11 ]] || check 3.11 oldest
  check "$version" newest
done
