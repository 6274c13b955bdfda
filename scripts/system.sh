#!/usr/bin/env bash
# System libraries for the simulators.
set -euo pipefail
