#!/usr/bin/env bash
# Everything that needs a GPU, in under eight minutes: the tests marked gpu, those of the row norms
# again without the features of cunorm/_core/caps.py, compute-sanitizer on a small set if it is
# installed, and first timings. From a source tree, with no install:
#
#   bench/check_gpu.sh [--dry-run] OUT_DIR
#
# Results are files in OUT_DIR; summary.txt has the outcome of each part. Every part runs, each with
# a time limit; the exit status is 1 if one failed. $PYTHON is the interpreter (default: python3),
# which needs cunorm's `cuda13` or `cuda12` extra and pytest; with torch it also times torch, and
# with Triton torch.compile, Liger-Kernel, fla-core and QuACK, if they are installed.
set -uo pipefail

usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; }

dry_run=false
if [[ ${1-} == --dry-run ]]; then
  dry_run=true
  shift
fi
if [[ ${1-} == -h || ${1-} == --help ]]; then
  usage
  exit 0
fi
if (($# != 1)) || [[ -z $1 || $1 == -* ]]; then
  usage >&2
  exit 2
fi

python=${PYTHON:-python3}
if $dry_run; then
  out=$1
  [[ $out == /* ]] || out=$PWD/$out
else
  mkdir -p "$1" || exit 2
  out=$(cd "$1" && pwd)
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
export PYTHONPATH=. PYTHONUNBUFFERED=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # JAX leaves memory to the others
summary=$out/summary.txt
failed=0

say() { if $dry_run; then echo "$*"; else echo "$*" | tee -a "$summary"; fi; }

part() { # NAME SECONDS COMMAND...: run a command with a time limit; its output goes to NAME.txt
  local name=$1 limit=$2 start=$SECONDS status
  shift 2
  if $dry_run; then
    printf '%s (at most %s s):' "$name" "$limit"
    printf ' %q' "$@"
    echo
    return
  fi
  timeout --kill-after=2 "$limit" "$@" >"$out/$name.txt" 2>&1
  status=$?
  case $status in
    0) say "$name: passed in $((SECONDS - start)) s" ;;
    124 | 137) say "$name: FAILED, stopped after $limit s" ;;
    *) say "$name: FAILED with status $status after $((SECONDS - start)) s" ;;
  esac
  if ((status)); then
    failed=1
    tail -n 15 "$out/$name.txt" | sed 's/^/  | /'
  fi
  return "$status"
}

sanitize() { # TOOL: run one tool of compute-sanitizer, if it is installed and supports the device
  local program
  program=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v compute-sanitizer)
  if [[ -z $program ]]; then
    say "$1: skipped, compute-sanitizer is not installed"
    return
  fi
  local before=$failed
  if ! part "$1" 60 "$program" --tool "$1" --error-exitcode 9 "$python" -m bench.gpu_check &&
    grep -q "Device not supported" "$out/$1.txt"; then
    say "$1: skipped after all, compute-sanitizer does not support this device"
    failed=$before
  fi
}

$dry_run || : >"$summary"
part device 20 "$python" -c 'from bench import gpu_timer, machine; print(machine.facts(gpu_timer.find()))'

workers=()
if "$python" -c "import xdist" 2>/dev/null; then
  cores=$(nproc)
  workers=(-n "$((cores < 8 ? cores : 8))")
fi
# Frameworks of other versions than CI's may warn; that is no failure here.
part tests 150 "$python" -m pytest -m "gpu and not exhaustive" -W default -q -ra "${workers[@]}"
# Plans without the features that not every GPU has.
part features-off 55 env CUNORM_FEATURES=none \
  "$python" -m pytest -m "gpu and not exhaustive" -W default -q -ra "${workers[@]}" \
  tests/operators/test_named_norms.py tests/operators/test_roundings.py \
  tests/operators/test_special_data.py tests/memory/test_accumulate.py
sanitize memcheck
sanitize racecheck
part timings 65 "$python" -m bench --device cuda --seconds-total 40 --seconds 0.2 \
  --providers cunorm-cupy,cunorm,torch --out "$out/timings.csv"
if "$python" -c "import torch, triton" 2>/dev/null; then
  # These compile and tune their kernels for each shape: few points fit this time.
  part peers 55 "$python" -m bench --device cuda --seconds-total 25 --seconds 0.2 \
    --providers cunorm,torch.compile,liger,fla,quack --dtype bfloat16 \
    --op rms_norm,rms_norm+post_gate,group_norm+silu --out "$out/peers.csv"
else
  say "peers: skipped, torch or triton is not installed"
fi

$dry_run && exit 0
if ((failed)); then say "something FAILED"; else say "all passed in $SECONDS s"; fi
exit "$failed"
