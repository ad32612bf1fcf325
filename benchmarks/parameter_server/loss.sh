#!/bin/sh
# Train the same small decoder on the same samples by each kind of dp: sh loss.sh FOLDER
set -eu
for kind in dp4 dp4:local/50 dp4:ps dp4:ssp/4 dp4:async; do
  ${PYTHON:-python} -m phalanx train --strategy "$kind" --steps 400 --threads 1 --eval-samples 256 --eval-every 50 \
    --shape.num-layers 2 --shape.hidden 64 --shape.ffn 128 --shape.num-heads 2 --corpus.seq-len 64 \
    --out "$1/$(echo "$kind" | tr ':/' '--')"
done
