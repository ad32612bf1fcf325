#!/usr/bin/env bash
# Everything that needs a GPU, in pieces of at most nine minutes each; see README.md.
#
#   run.sh [--piece NAME]... [--dry-run] [--out FOLDER] [--device cpu|cuda] [--tiny]
#
# --dry-run prints the commands. --device cpu --tiny runs a piece where there is no GPU, to try it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
out=$here/results
device=cuda
limit_s=540
all="tests ceiling mlp llama3-1b llama3-1b-compiled llama3-8b llama3-8b-compiled table"
pieces=""
is_dry=0
is_tiny=0

refuse() {
    echo "run.sh: $1" >&2
    exit 2
}

while [ $# -gt 0 ]; do
    case $1 in
    --piece | --out | --device)
        [ $# -gt 1 ] || refuse "$1 wants a value"
        case $1 in
        --piece)
            case " $all " in
            *" $2 "*) pieces="$pieces $2" ;;
            *) refuse "no piece '$2'; the pieces are $all" ;;
            esac
            ;;
        --out) out=$2 ;;
        --device)
            case $2 in
            cpu | cuda) device=$2 ;;
            *) refuse "device is '$2'; it must be cpu or cuda" ;;
            esac
            ;;
        esac
        shift
        ;;
    --dry-run) is_dry=1 ;;
    --tiny) is_tiny=1 ;;
    *) refuse "unknown option '$1'; there are --piece, --dry-run, --out, --device and --tiny" ;;
    esac
    shift
done

# Sizes for a try where there is no GPU.
small_ceiling=() small_mlp=() small_decoder=()
if [ $is_tiny = 1 ]; then
    small_ceiling=(--max-size 512 --budget-s 1)
    small_mlp=(--width 256 --layers 2 --budget-s 1)
    small_decoder=(--model tiny --budget-s 1)
fi

run() {
    if [ $is_dry = 1 ]; then
        echo "timeout $limit_s $*"
        return
    fi
    echo "== $*"
    (cd "$root" && timeout "$limit_s" "$@")
}

run_piece() {
    local main=("$python" "$here/main.py") bench=("$python" -m phalanx bench)
    case $1 in
    tests) run "$python" -m pytest -q -m gpu tests ;;
    ceiling)
        run "${bench[@]}" ceiling --device "$device" --out "$out" ${small_ceiling[@]+"${small_ceiling[@]}"}
        ;;
    mlp)
        run "${bench[@]}" mfu --recipe lecture --device "$device" --out "$out" ${small_mlp[@]+"${small_mlp[@]}"}
        ;;
    llama3-*)
        local compiled=()
        case $1 in *-compiled) compiled=(--compile) ;; esac
        run "${main[@]}" decoder --model "${1%-compiled}" --device "$device" --out "$out" \
            ${compiled[@]+"${compiled[@]}"} ${small_decoder[@]+"${small_decoder[@]}"}
        ;;
    table) run "${main[@]}" table --out "$out" ;;
    esac
}

if [ $is_dry = 0 ] && [ $device = cuda ] &&
    ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    refuse "this host has no CUDA device, or its PyTorch is built without; \`phalanx doctor\` says which. Try a piece with --device cpu --tiny"
fi
failed=""
[ $is_dry = 1 ] || mkdir -p "$out"
for piece in ${pieces:-$all}; do
    run_piece "$piece" || failed="$failed $piece"
done
[ -z "$failed" ] || {
    echo "run.sh: failed:$failed" >&2
    exit 1
}
