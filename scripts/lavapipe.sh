#!/usr/bin/env bash
# A software Vulkan driver (Mesa's lavapipe, >= 24.3) for ManiSkill on machines without a GPU, unpacked into
#   ${XDG_CACHE_HOME:-~/.cache}/rlinf-plugins/mesa-<version>/{lib/*.so*, lvp_icd.json, preload}
# from the distribution's own signed packages (Debian 12: backports), with a private apt state: the system's sources,
# lists and packages stay as they are, and no root is needed. `preload` lists the libraries in the order in which a
# process loads them before the driver (rlinf_plugins.envs.rendering), so no library path has to be set.
# RLINF_LAVAPIPE=1 fetches it even where a GPU or a new enough system driver exists.
set -euo pipefail
say() { printf '%s\n' "$*" >&2; }

oldest=24.3
cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlinf-plugins
advice="ManiSkill without a GPU needs Mesa's lavapipe >= $oldest (package mesa-vulkan-drivers)"

for complete in "$cache"/mesa-*/.complete; do
  if [ -e "$complete" ]; then exit 0; fi
done
if [ "${RLINF_LAVAPIPE:-}" != 1 ]; then
  if [ -e /proc/driver/nvidia/version ]; then exit 0; fi # the GPU's own driver renders
  if command -v dpkg-query >/dev/null; then
    installed=$(dpkg-query -W -f '${db:Status-Status} ${Version}' mesa-vulkan-drivers 2>/dev/null || true)
    case $installed in
      "installed "*) if dpkg --compare-versions "${installed#* }" ge "$oldest"; then exit 0; fi ;;
    esac
  fi
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
  say "warning: $advice; install it with this system's package manager"
  exit 0
fi

mkdir -p "$cache"
exec 9>"$cache/mesa.lock"
flock 9 # two checkouts may run this at once
for complete in "$cache"/mesa-*/.complete; do
  if [ -e "$complete" ]; then exit 0; fi
done
work=$(mktemp -d "$cache/mesa-work.XXXXXX")
trap 'rm -rf "$work"' EXIT

. /etc/os-release
mkdir -p "$work"/{lists/partial,archives/partial,root}
: >"$work/status" # no package counts as installed, so that every library is brought along
private=(-qq -o "Dir::Etc::SourceList=$work/sources.list" -o "Dir::Etc::SourceParts=/dev/null"
  -o "Dir::State=$work" -o "Dir::State::Lists=$work/lists" -o "Dir::State::status=$work/status"
  -o "Dir::Cache=$work" -o "Dir::Cache::archives=$work/archives" -o "Dir::Etc::Preferences=/dev/null"
  -o "Dir::Etc::PreferencesParts=/dev/null" -o "Dir::Log=$work" -o "APT::Sandbox::User=" -o "Acquire::Languages=none"
  -o "Acquire::Retries=3" -o "APT::Update::Post-Invoke-Success=" -o "DPkg::Post-Invoke=" -o "Acquire::IndexTargets::deb-src=")

# The machine's own mirrors, reduced to this release; Debian gets the backports of the same mirror.
backports=
keyring=/usr/share/keyrings/$ID-archive-keyring.gpg
option=
if [ -e "$keyring" ]; then option="[signed-by=$keyring]"; fi # else apt's trusted keys
if [ "$ID" = debian ]; then backports=$VERSION_CODENAME-backports; fi
apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
  while read -r uri release component; do
    case $release in
      "$VERSION_CODENAME" | stable | oldstable)
        printf 'deb %s %s %s %s\n' "$option" "$uri" "$release" "$component"
        if [ -n "$backports" ] && [ "$component" = main ]; then printf 'deb %s %s %s main\n' "$option" "$uri" "$backports"; fi
        ;;
      "$VERSION_CODENAME"-*) printf 'deb %s %s %s %s\n' "$option" "$uri" "$release" "$component" ;;
    esac
  done | sort -u >"$work/sources.list"

say "fetching a private software Vulkan driver (about 60 MB, once)"
if ! apt-get "${private[@]}" update >"$work/log" 2>&1 </dev/null; then
  tail -n 3 "$work/log" >&2
  say "warning: $advice, and the package index could not be read (see above); run this again when it can"
  exit 0
fi
# The newest version on offer, wherever it comes from: backports count less by default.
version=$(apt-cache "${private[@]}" madison mesa-vulkan-drivers | awk -F' *[|] *' '{ print $2 }' |
  { best=0; while read -r v; do if dpkg --compare-versions "$v" gt "$best"; then best=$v; fi; done; printf '%s' "$best"; })
if ! dpkg --compare-versions "$version" ge "$oldest"; then
  say "warning: $advice; ${PRETTY_NAME:-this system} offers $version: use a newer release or add a repository that has it"
  exit 0
fi
if ! apt-get "${private[@]}" ${backports:+-t "$backports"} --yes --download-only --no-install-recommends install \
  "mesa-vulkan-drivers=$version" >"$work/log" 2>&1 </dev/null; then
  tail -n 3 "$work/log" >&2
  say "warning: $advice, and the packages could not be fetched (see above); run this again when they can"
  exit 0
fi
for package in "$work"/archives/*.deb; do
  case ${package##*/} in libc6_* | libgcc-s1_* | libstdc++6_* | gcc-*) continue ;; esac # the system's own, always newer or equal
  dpkg-deb -x "$package" "$work/root"
done

# Keep what the driver loads, dependencies first.
built=$work/mesa
mkdir -p "$built/lib"
driver=$(find "$work/root" -name libvulkan_lvp.so -print -quit)
folders=$(find "$work/root" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
LD_LIBRARY_PATH=$folders ldd "$driver" | awk -v root="$work/root" 'index($3, root) == 1 { print $1, $3 }' >"$work/used"
while read -r name path; do cp -L "$path" "$built/lib/$name"; done <"$work/used"
cp "$driver" "$built/lib/"
(
  cd "$built/lib"
  for name in *.so*; do
    printf '%s %s\n' "$name" "$name"
    LD_LIBRARY_PATH=$PWD ldd "$name" | awk -v here="$PWD/" -v name="$name" 'index($3, here) == 1 { print $1, name }'
  done | tsort | grep -v '^libvulkan_lvp.so$'
) >"$built/preload"
target=$cache/mesa-$version
printf '{"file_format_version": "1.0.0", "ICD": {"library_path": "%s", "api_version": "1.3.0"}}\n' \
  "$target/lib/libvulkan_lvp.so" >"$built/lvp_icd.json"
rm -rf "$target"
mv "$built" "$target"
touch "$target/.complete"
say "software Vulkan driver: $target"
