#!/usr/bin/env bash
# System libraries the simulators need: shared objects from the distribution, and a software Vulkan driver.
#
# Looks for the libraries themselves, not for packages, so that any way of installing them counts. Installs with apt
# where that needs no question (root, or sudo without a password), else says in one line what to install.
# The second run takes well under a second. Never fails a build by itself: `rlinf-plugins doctor` says what a missing
# library disables.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '%s\n' "$*" >&2; }

# shared object : Debian and Ubuntu package
needed="libOSMesa.so:libosmesa6 libEGL.so.1:libegl1 libEGL_mesa.so.0:libegl-mesa0 libGL.so.1:libgl1
libGLX_mesa.so.0:libgl1-mesa-dri libvulkan.so.1:libvulkan1 libX11.so.6:libx11-6 libgthread-2.0.so.0:libglib2.0-0"

missing_packages() {
  local known entry packages=()
  known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
  for entry in $needed; do
    case $known in *"${entry%%:*}"*) ;; *) packages+=("${entry##*:}") ;; esac
  done
  printf '%s' "${packages[*]}"
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

install_packages() {
  local log
  command -v apt-get >/dev/null && as_root true 2>/dev/null || return 1
  say "installing system libraries: $*"
  log=$(mktemp)
  local apt="env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120"
  if as_root $apt update >"$log" 2>&1 </dev/null &&
    as_root $apt install --yes --no-install-recommends "$@" >>"$log" 2>&1 </dev/null; then
    rm -f "$log"
  else
    tail -n 5 "$log" >&2
    rm -f "$log"
    return 1
  fi
}

packages=$(missing_packages)
if [ -n "$packages" ]; then
  # shellcheck disable=SC2086  # a list of package names
  install_packages $packages || say "warning: the simulators need system libraries; install them: apt-get install $packages"
fi
bash scripts/lavapipe.sh
