#!/bin/sh
# steps.sh MOESIM MODULE: captures on 4 ranks with the GPU part (on doubles) against the same on the CPU.
echo todo
