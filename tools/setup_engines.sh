#!/usr/bin/env bash
# Makes .venv-engines: vLLM for CPUs, transformers, torch, and this checkout, for `make test-engines`.
#
# What always holds: a completed step is not repeated, whatever was interrupted. The stamp is inside .venv-engines, has a
# hash of everything that it depends on, and is written last. When it matches, neither pip nor the network is used.
#
# What it doesn't do: build anything. tools/setup.sh, which must have run, has built the C cores into the checkout, and
# both environments use the same files; so .venv-engines gets a path to the checkout and not a build of its own, which
# would overwrite libraries that running processes of .venv have mapped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv-engines

say() { printf 'set-up of the engines: %s\n' "$*"; }
die() {
  printf 'set-up of the engines: %s\n' "$*" >&2
  exit 1
}

[[ -x $root/.venv/bin/python ]] || die "there is no .venv yet; run make setup first."

# Two set-ups of one checkout at a time would overwrite each other's files.
mkdir -p "$root/.cache"
exec 9>"$root/.cache/setup-engines.lock"
if command -v flock >/dev/null; then
  flock -w 1800 9 || die "another set-up of this checkout has been running for 30 minutes; end it and try again."
fi

# The root is part of the hash: a venv that was moved or copied names its old place in every script.
version=$("$root/.venv/bin/python" -c 'import sys; print(sys.base_prefix, sys.version)')
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
wanted=$( (printf '%s\n' "$version" "$root" && cat requirements-engines.txt requirements-torch.txt) | sha256sum | cut -d' ' -f1)
stamp=$venv/.stamp-engines

# As an installed wheel has it: vLLM finds our connectors by their entry point.
describe() {
  local packages
  packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  local told=$packages/triggerkv-0.dist-info
  [[ -f $told/entry_points.txt && ! pyproject.toml -nt $told/entry_points.txt ]] && return
  mkdir -p "$told"
  printf 'Metadata-Version: 2.1\nName: triggerkv\nVersion: 0\n' >"$told/METADATA"
  "$venv/bin/python" - >"$told/unfinished" <<'END'
import tomllib

for group, points in tomllib.load(open("pyproject.toml", "rb"))["project"]["entry-points"].items():
    print(f"[{group}]", *(f"{name} = {where}" for name, where in points.items()), sep="\n")
END
  mv "$told/unfinished" "$told/entry_points.txt"
}

if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
  describe
  exit 0
fi

if [[ ! -d $venv ]]; then why="there is none yet"
elif [[ ! -f $stamp ]]; then why="the last set-up did not finish"
else why="the Python, the folder or the list of packages changed"; fi
say "making .venv-engines, because $why (a minute or two, 2.4 GB)"
rm -rf "$venv"
"$root/.venv/bin/python" -m venv "$venv" || die ".venv's Python could not make .venv-engines; its output is above."
log=$root/.cache/pip-engines.log
# --no-deps: the list is complete, and a package that is not on it must not come in by itself.
: >"$log"
for list in requirements-torch.txt requirements-engines.txt; do # apart, because pip takes digests for all or for none
  "$venv/bin/python" -m pip install --no-deps -r "$list" >>"$log" 2>&1 || {
    tail -n 15 "$log" >&2
    die "pip could not install $list; the end of its output is above, all of it in .cache/pip-engines.log"
  }
done
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$root" >"$packages/triggerkv-checkout.pth"
describe
printf '%s\n' "$wanted" >"$stamp"
