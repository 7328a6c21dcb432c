#!/bin/sh
# Thirty captures that are killed (tests/cli/test_kills.sh). Usage: kills.sh MOESIM [SEED]
exec "$(dirname "$0")/../cli/test_kills.sh" "$1" 30 "${2:-$$}"
