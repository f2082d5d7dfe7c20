#!/usr/bin/env bash
# Test and time cunorm on a machine with an NVIDIA GPU, from a source tree, without an install:
#
#   bench/check_gpu.sh [--second] [--dry-run] OUT_DIR
#
# The steps take seven minutes: describe the machine; run smoke tests, each in its own process;
# compile all kernels in parallel; run the tests marked gpu; run compute-sanitizer, if it is
# installed; time cunorm, PyTorch and a plain copy. The steps of --second take four minutes: time
# torch.compile and, if they are installed, Liger-Kernel, fla-core and QuACK; test the norms
# without the features of cunorm/_core/caps.py. --dry-run only prints the commands.
#
# OUT_DIR gets a CSV for each set of timings, and one log, which ends with a line for each step. All
# steps run; the exit status is 1 if a step failed. A step may use the time that earlier steps left.
# CHECK_GPU_SECONDS is the time of all steps together (default: 420; 240 for --second). $PYTHON is the
# interpreter (default: python3), which needs cunorm's `test` extra and may have torch and a CUDA JAX.
# CHECK_GPU_SMALL=1 tries this script on the software GPU, with few tests and small arrays.
set -uo pipefail

usage() { sed -n '2,16s/^# \{0,1\}//p' "$0"; }

second=false dry_run=false
while [[ ${1-} == --?* ]]; do
  case $1 in
    --second) second=true ;;
    --dry-run) dry_run=true ;;
    --help) usage && exit 0 ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift
done
if (($# != 1)) || [[ -z $1 || $1 == -* ]]; then
  usage >&2
  exit 2
fi

out=$1
[[ $out == /* ]] || out=$PWD/$out
log=$out/check_gpu.log
$dry_run || { mkdir -p "$out" && : >>"$log"; } || exit 2
python=$(command -v "${PYTHON:-python3}") || { echo "no interpreter: ${PYTHON:-python3}" >&2 && exit 2; }
[[ $python == /* ]] || python=$PWD/$python
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
# JAX must leave memory to other libraries. Unbuffered output is in the log even if a step is stopped.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONUNBUFFERED=1
whole=420
$second && whole=240
stretch=${CHECK_GPU_SMALL:+3} # the software GPU needs more time
seconds=${CHECK_GPU_SECONDS:-$((whole * ${stretch:-1}))}
if [[ ! $seconds =~ ^[1-9][0-9]{0,5}$ ]]; then
  echo "CHECK_GPU_SECONDS is $seconds, expected a number of seconds" >&2
  exit 2
fi
cores=$(nproc)
summary=() failed=()

run=("$python") # runs Python on the GPU, or on the software GPU
few_tests=() every=1 points=(--quick)
if [[ ${CHECK_GPU_SMALL-} ]]; then
  run=("$python" -m tests.softgpu "$python")
  few_tests=(-k "cupy and (float32 or roundings or without_a_copy)") every=12
  points=(--op "rms_norm,layer_norm,group_norm+silu" --shapes "6x256,2x32x6x5" --seconds 0.01)
  SOFTGPU_PTX=$(mktemp -d) # empty, as on a machine that never ran cunorm
  export SOFTGPU_PTX
  trap 'rm -rf "$SOFTGPU_PTX"' EXIT
fi

now() { echo $((${EPOCHREALTIME/[.,]/} / 1000)); } # in milliseconds
scaled() { echo $(($1 * seconds / whole)); }       # $1 seconds of a run of $whole, scaled to one of $seconds
has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }
say() { if $dry_run; then echo "$*"; else echo "$*" | tee -a "$log"; fi; }
note() { # TEXT: add a line to the summary
  summary+=("$1")
  say "$1"
}

job=0 running=check_gpu.sh # the process of a step, and its name
imports=()
stop() { # a signal ends the step, and the script
  if ((job)) && kill -INT "$job" 2>/dev/null; then
    timeout 5 tail --pid="$job" -f /dev/null || kill -TERM "$job" # a step may ignore interrupts
    wait "$job"
  fi
  kill "${imports[@]}" 2>/dev/null
  summary+=("$running: stopped by a signal")
  say "$(printf '\n%s' "${summary[@]}")"
  exit 130
}
trap stop INT TERM HUP

begin=$(now)
planned=0 # the END of the last step that --dry-run printed
step() { # NAME END COMMAND...: run a command, and stop it END seconds after the begin
  local name=$1 end=$2 start bytes limit status took shown line
  shift 2
  if $dry_run; then
    printf '%s (%s to %s s):' "$name" "$(scaled "$planned")" "$(scaled "$end")"
    printf ' %q' "$@"
    echo
    planned=$end
    return
  fi
  start=$(now)
  limit=$((begin + end * seconds * 1000 / whole - start))
  ((limit > 1000)) || limit=1000 # earlier steps may have ended too late
  printf -v limit '%d.%03d' $((limit / 1000)) $((limit % 1000))
  { printf '\n== %s, in at most %s s:' "$name" "$limit" && printf ' %q' "$@" && echo; } >>"$log"
  bytes=$(wc -c <"$log")
  set -m # otherwise a step in the background would ignore an interrupt
  timeout -s INT --kill-after=10 "$limit" "$@" >>"$log" 2>&1 </dev/null &
  set +m
  job=$! running=$name
  wait "$job"
  status=$? job=0
  took=$((($(now) - start + 500) / 1000))
  shown=$(tail -c +$((bytes + 1)) "$log" | tail -n 15)
  case $status in
    0) note "$name: passed in $took s" ;;
    124 | 137) note "$name: STOPPED after $limit s" ;;
    *) note "$name: FAILED with status $status after $took s" ;;
  esac
  if ((status == 0)); then # show what was skipped
    while read -r line; do note "  without: $line"; done < <(
      tail -c +$((bytes + 1)) "$log" | sed -n 's/^ *\(.* is left out: \)/\1/p' | sort -u
    )
    return
  fi
  failed+=("$name")
  echo "  | ${shown//$'\n'/$'\n'  | }"
  return "$status"
}

tests() { # NAME END [VARIABLE=VALUE]...: run tests marked gpu
  local name=$1 end=$2 options=()
  shift 2
  local workers=$((cores - 2 > 14 ? 14 : cores - 2 > 1 ? cores - 2 : 1))
  has xdist && options+=(-n "$workers")
  has pytest_timeout && options+=(--timeout="$(scaled 90)" --timeout-method=thread)
  # Versions of frameworks that CI does not have may warn; a warning is not a failure here.
  step "$name" "$end" env "$@" "$python" -m pytest -v --tb=short "${options[@]}" \
    -m "gpu and not exhaustive" -W default "${few_tests[@]}" "${files[@]}"
}

sanitize() { # TOOL END: make some calls under a tool of compute-sanitizer
  local program bytes failed_before=("${failed[@]}")
  program=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v compute-sanitizer)
  if [[ -z $program ]]; then
    note "$1: skipped: compute-sanitizer is not installed"
    return 1
  fi
  $dry_run || bytes=$(wc -c <"$log")
  if ! step "$1" "$2" "$program" --tool "$1" --error-exitcode 9 "${calls[@]}" &&
    tail -c +"$bytes" "$log" | grep -q "Device not supported"; then
    note "$1: skipped after all: compute-sanitizer does not support this device"
    failed=("${failed_before[@]}")
    return 1
  fi
}

left() { # END: seconds until shortly before END, at least 1
  local seconds_left=$(((begin - $(now)) / 1000 + $(scaled $(($1 - 5)))))
  $dry_run && seconds_left=$(scaled $(($1 - 5 - planned)))
  echo $((seconds_left > 1 ? seconds_left : 1))
}

time_at() { # NAME END PROVIDERS ARGUMENT...: time some calls; the rows go to NAME.csv
  local name=$1 end=$2 providers=$3
  shift 3
  step "$name" "$end" "${run[@]}" -m bench --device cuda --dtype bfloat16,float32 \
    --seconds 0.2 --seconds-total "$(left "$end")" --providers "$providers" "$@" \
    --out "$out/$name.csv"
}

require_gpu() { # without a GPU, tests would run on the software GPU, as in CI
  local missing
  [[ ${CHECK_GPU_SMALL-} ]] || $dry_run && return
  missing=$("$python" -c 'import cupy; cupy.cuda.runtime.getDeviceCount()' 2>&1) && return
  kill "${imports[@]}" 2>/dev/null
  say "no GPU: ${missing##*$'\n'}; CHECK_GPU_SMALL=1 tries this script without one"
  exit 2
}

first_part() {
  local module
  # Start the first imports, which take long because they read from a disk.
  for module in $($dry_run || echo torch jax cupy); do
    timeout "$(scaled 25)" "$python" -c "import $module" >/dev/null 2>&1 &
    imports+=($!)
  done
  require_gpu
  step info 25 "${run[@]}" -m cunorm info
  wait
  step smoke 65 "${run[@]}" -m bench.timing.smoke --seconds "$(scaled 30)"
  step compile 95 "${run[@]}" -m bench builds compile --jobs "$cores" --every "$every" \
    --seconds "$(left 95)"
  files=()
  tests tests 225
  local calls=("${run[@]}" -m bench.timing.sanitize --every "$every")
  sanitize memcheck 270 || step calls 270 "${calls[@]}" # at least check the results
  say "racecheck: a hit need not be a race: the tool may not know that an mbarrier waits for st.async"
  sanitize racecheck 315
  time_at timings 400 cunorm,torch,cunorm-cupy "${points[@]}"
}

second_part() {
  local missing=
  require_gpu
  $dry_run || missing=$("$python" -c '
import torch, triton
torch.cuda.is_available() or exit("torch has no CUDA")' 2>&1)
  if [[ $missing ]]; then
    note "peers, torch.compile: skipped: ${missing##*$'\n'}"
  else
    time_at peers 90 cunorm,liger,fla,quack "${points[@]}"
    # torch.compile compiles and tunes its kernels for each shape.
    time_at torch.compile 150 cunorm,torch.compile --dtype bfloat16 --op rms_norm,rms_norm+post_gate \
      --shapes 16384x4096,131072x256
  fi
  files=(tests/operators/test_named_norms.py tests/operators/test_roundings.py
    tests/operators/test_special_data.py tests/memory/test_accumulate.py)
  tests features-off 210 CUNORM_FEATURES=none
}

if $second; then
  second_part
else
  $dry_run || { : >"$log" && rm -f "$out"/{timings,peers,torch.compile}.csv; } # of an earlier run
  first_part
fi
$dry_run && exit 0
say "$(printf '\n%s' "${summary[@]}")"
printf -v names '%s, ' "${failed[@]}"
if ((${#failed[@]})); then verdict="FAILED or STOPPED: ${names%, }"; else verdict="nothing failed"; fi
say "$verdict; $((($(now) - begin) / 1000)) s in all"
exit $((${#failed[@]} > 0))
