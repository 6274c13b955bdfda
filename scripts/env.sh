#!/usr/bin/env bash
# Creates the development environment and prints its interpreter on stdout (everything else goes to stderr).
#
# Two layers: the locked packages live in a cache folder keyed by the hash of requirements.lock and the Python version,
# shared by all checkouts; each checkout has a thin .venv on top that holds only this project, editable.
# The second run takes well under a second.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '%s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  say "error: no Python 3.11 or 3.12 with the venv module was found."
  say "fix:   apt-get install python3 python3-venv (Debian 12, Ubuntu 24.04), or set PYTHON=/path/to/python3.11"
  exit 1
}

python=$(find_python)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlinf-plugins
tag=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
hash=$(sha256sum requirements.lock | cut -c1-16)
base=$cache/venv-$tag-$hash

if [ ! -e "$base/.complete" ]; then
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  flock 9 # two checkouts may bootstrap at once
  if [ ! -e "$base/.complete" ]; then
    say "creating the environment (once per lock file; about 9 GB and a few minutes): $base"
    rm -rf "$base"
    "$python" -m venv "$base"
    # The lock is complete, so pip only downloads; --no-deps keeps its resolver out of it.
    "$base/bin/python" -m pip install --quiet --no-deps --require-hashes -r requirements.lock 1>&2
    "$base/bin/python" -m pip check 1>&2
    touch "$base/.complete"
  fi
  exec 9>&-
fi

stamp=.venv/.stamp
want="$PWD $base $(sha256sum setup.cfg | cut -c1-16)" # a moved checkout is installed anew
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
  say "installing the project, editable, into .venv"
  if [ ! -d ".venv/lib/python$tag" ]; then rm -rf .venv; fi # another Python; else updated in place, jobs may be using it
  "$python" -m venv --without-pip .venv
  site=.venv/lib/python$tag/site-packages
  # addsitedir, not a plain path line, so that .pth files of the locked packages are honoured too.
  printf 'import site; site.addsitedir("%s")\n' "$base/lib/python$tag/site-packages" >"$site/_locked_packages.pth"
  .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable . >/dev/null 2>.venv/install.log || { cat .venv/install.log >&2; exit 1; }
  rm -rf rlinf_plugins.egg-info # a build leftover that would shadow the installed metadata when run from here
  printf '%s' "$want" >"$stamp"
fi
printf '%s\n' "$PWD/.venv/bin/python"
