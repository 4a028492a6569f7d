#!/usr/bin/env bash
# Tests the GPU path on a machine that has one, in one call of less than nine minutes, without a network: builds the
# native module, runs the tests that need a GPU, measures, and writes the results as JSON and as tables.
#
# A failure of a stage is recorded, and the later stages run all the same. Needs python3 with torch, pybind11,
# setuptools, numpy, safetensors and pytest, and a C++ compiler; nothing is installed, and the tree is used as it is.
set -u -o pipefail

usage() {
  cat << 'END'
benchmarks/gpu.sh [DIR] [--quick] [--device DEVICE] [--no-build] [--limit S]

  DIR              a directory on the disk to measure; left as it was (default: a temporary one)
  --quick          small sizes and one round: shows that all of it runs, in about three minutes
  --device DEVICE  cuda, cuda:1, or cpu, which rehearses on a machine without a GPU (default: cuda)
  --no-build       build nothing: use a fastpersist that python3 can import, installed, or by an absolute PYTHONPATH;
                   one built elsewhere will do if Python's version, torch and the C library are the same
  --limit S        time for everything (default: 525)

Environment: PYTHON, the interpreter (default: python3); RESULTS, where results go (default: benchmarks/results/; where
nothing can be written there, OUT, and without it standard output); OUT, a directory that gets a copy of them, and of
all logs.
END
}

directory='' quick='' device=cuda build=yes limit_s=525
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --quick) quick=yes ;;
    --no-build) build='' ;;
    --device) device=${2:?--device wants a name}; shift ;;
    --limit) limit_s=${2:?--limit wants seconds}; shift ;;
    -*) usage >&2; exit 2 ;;
    *) directory=$1 ;;
  esac
  shift
done

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(command -v "${PYTHON:-python3}") || {
  echo "${PYTHON:-python3} is not there; PYTHON names another" >&2
  exit 2
}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
results=${RESULTS:-$repository/benchmarks/results}
work=$(mktemp -d) || exit 1

# What was begun is ended, and what was made goes, however this script ends. So stages run in the background: a signal
# that comes meanwhile is answered at once.
is_mounted=''
clean_up() {
  local running
  trap '' INT TERM HUP
  for running in "$work"/running/*; do # named by the process
    [ -e "$running" ] && kill "${running##*/}" 2> /dev/null
  done
  wait
  if [ -n "$is_mounted" ]; then
    umount "$work/memory" || umount -l "$work/memory"
  fi
  rm -rf --one-file-system "$work"
}
trap clean_up EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir "$work/logs" "$work/tests" "$work/running" "$work/memory"

# is_usable DIR: makes it if it is not there, and sees whether a file can be made in it; root is asked nothing else.
is_usable() {
  mkdir -p "$1" 2> /dev/null && touch "$1/.gpu-sh-$$" 2> /dev/null && rm -f "$1/.gpu-sh-$$"
}
out=${OUT:-}
if [ -n "$out" ] && ! is_usable "$out"; then
  echo "nothing can be written to OUT, $out" >&2
  out=''
fi
out=${out:+$(cd "$out" && pwd)}
if ! is_usable "$results"; then
  echo "nothing can be written to $results; results go to ${out:-standard output}" >&2
  results=${out:-$work/results}
  mkdir -p "$results"
fi
results=$(cd "$results" && pwd)
sources=$(cd "$repository" && find csrc setup.py -type f -print0 | LC_ALL=C sort -z | xargs -0 cat | sha256sum)
sources=${sources:0:12}
echo "benchmarks/gpu.sh${directory:+ $directory}${quick:+ --quick} --device $device (native sources $sources)" \
  > "$work/command"
if [ -z "$directory" ]; then
  directory=$work/disk
  mkdir "$directory"
fi
if [ ! -d "$directory" ]; then
  echo "$directory is no directory; name one on the disk to measure" >&2
  exit 2
fi
directory=$(cd "$directory" && pwd)
SECONDS=0
left_s() { echo $((limit_s - SECONDS)); }

# stage NAME LIMIT_S COMMAND…: runs it, keeps what it says in a log, and notes how it ended and how long it took.
# When its time is up it gets $signal, by which it can still write down what it has, and is killed $grace_s later.
signal=TERM grace_s=15
stage() {
  local name=$1 stage_limit_s=$2 start=$SECONDS status pid
  shift 2
  if [ "$stage_limit_s" -lt 5 ]; then
    echo 'no time was left' > "$work/logs/$name.log"
    status=124
  else
    timeout -s "$signal" -k "$grace_s" "$stage_limit_s" "$@" > "$work/logs/$name.log" 2>&1 &
    pid=$!
    : > "$work/running/$pid"
    wait "$pid"
    status=$?
    rm -f "$work/running/$pid"
  fi
  printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - start))" >> "$work/stages.tsv"
  echo "=== $name: exit status $status after $((SECONDS - start)) s"
  if [ "$status" -ne 0 ]; then
    tail -n 25 "$work/logs/$name.log"
  fi
  return "$status"
}

# --- build: into a directory of its own, so that an environment of the tree stays what it is. No pyproject.toml is in
# sight: old releases of setuptools refuse ours. Objects are kept in build/gpu/ for the next call with the same sources:
# by their contents, since a copied tree may have files that are older than objects of what it was before. In a tree
# that cannot be written they are not kept.
build_module() {
  local kept=$repository/build/gpu/$sources entry
  if is_usable "$kept"; then
    find "$repository/build/gpu" -mindepth 1 -maxdepth 1 ! -name "$sources" -exec rm -rf {} + 2> /dev/null
  else
    kept=$work/build
  fi
  mkdir -p "$work/tree" "$kept" "$work/site/fastpersist" || return 1
  ln -s "$repository/setup.py" "$repository/csrc" "$work/tree/"
  ln -s "$kept" "$work/tree/build"
  # A package of links: fastpersist/, where integrations/ is fastpersist.integrations as in an installed one.
  for entry in "$repository"/fastpersist/*; do
    case $entry in
      *.so | */__pycache__) ;;
      *) ln -s "$entry" "$work/site/fastpersist/" ;;
    esac
  done
  ln -s "$repository/integrations" "$work/site/fastpersist/integrations"
  export FASTPERSIST_BUILD_JOBS=${FASTPERSIST_BUILD_JOBS:-$(nproc)}
  # The tests make requests fail by the fault engine.
  cd "$work/tree" && FASTPERSIST_FAULT_ENGINE=1 "$python" setup.py build_ext --build-lib "$work/lib" || return 1
  cp "$work"/lib/fastpersist/_native*.so "$work/site/fastpersist/" || return 1
  cd "$work" && PYTHONPATH=$work/site "$python" -c 'import fastpersist; print(fastpersist.__file__)'
}
export -f build_module is_usable
export work repository python sources

if [ -n "$build" ]; then
  if stage build "$((limit_s * 2 / 5))" bash -c build_module; then
    export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
  elif (cd "$work" && timeout 60 "$python" -c 'import fastpersist' 2> /dev/null); then
    echo 'the build has failed: what is measured is the fastpersist that python3 imports' | tee -a "$work/command"
  fi
fi
timeout 20 nvidia-smi --format=csv,noheader \
  --query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max \
  > "$work/nvidia-smi" 2> /dev/null || rm -f "$work/nvidia-smi"

# --- tests: all files at the same time, each in a process of its own, so that one that crashes or hangs costs no other.
# The options of pyproject.toml are not used, as they ask for plugins that may be missing. With pytest-timeout, one that
# hangs costs no other test of its file either.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
plugins=()
if "$python" -c 'import pytest_timeout' 2> /dev/null; then
  plugins=(-p pytest_timeout --timeout 90)
fi
cat > "$work/pytest.ini" << END
[pytest]
addopts = --import-mode=importlib -p no:cacheprovider -ra
pythonpath = '$repository/tests'
faulthandler_timeout = 45
tmp_path_retention_policy = none
markers =
    gpu: needs a GPU
    long: takes minutes
END
if [ "$device" != cuda ]; then
  export FASTPERSIST_GPU_TESTS_ON=$device
fi
tests_limit_s=$((limit_s / 4))
if [ "$tests_limit_s" -gt "$(($(left_s) - 60))" ]; then
  tests_limit_s=$(($(left_s) - 60))
fi
signal=INT grace_s=30 # pytest ends in order, with a report of what it has done
cd "$work" # not the tree, whose fastpersist/ has no native module and would be found first
for file in "$repository"/tests/gpu/test_*.py; do
  name=$(basename "$file" .py)
  stage "$name" "$tests_limit_s" "$python" -X faulthandler -m pytest -c "$work/pytest.ini" \
    --rootdir "$repository" --confcutdir "$repository" --basetemp "$work/tmp-$name" \
    ${plugins[@]+"${plugins[@]}"} -v -m gpu --junitxml "$work/tests/$name.xml" "$file" &
done
wait
signal=TERM grace_s=15

# --- measurements. The part tmpfs wants a file system in memory; containers often have a small one, or none. Root
# mounts one. Others may do so where only the processes of that part see it, if the kernel lets them and the device can
# be used there. Else gpu.py takes the one with most room.
half_kib=$(awk '$1 == "MemTotal:" { print int($2 / 2) }' /proc/meminfo)
wanted_kib=$((half_kib * 3 / 4 < 24 << 20 ? half_kib * 3 / 4 : 24 << 20)) # three times the largest state
have_room() {
  local free_kib place
  df --output=avail,target -k -t tmpfs 2> /dev/null | while read -r free_kib place; do
    case $place in /sys/* | /proc/*) continue ;; esac
    [ "$free_kib" -ge "$wanted_kib" ] 2> /dev/null && [ -w "$place" ] && echo "$place"
  done
}
memory=()
if [ -n "$(have_room)" ]; then
  : # gpu.py finds it
elif [ "$(id -u)" = 0 ] && mount -t tmpfs -o size="${half_kib}k" tmpfs "$work/memory" 2> /dev/null; then
  is_mounted=yes
  memory=(--memory-dir "$work/memory")
elif timeout 60 unshare --user --map-root-user --mount sh -c \
  'mount -t tmpfs tmpfs "$1" && exec "$2" -c "import torch; torch.ones(1, device=\"$3\")"' \
  sh "$work/memory" "$python" "$device" 2> /dev/null; then
  memory=(--memory-mount "$work/memory")
fi
measure=("$python" "$repository/benchmarks/gpu.py" "$directory" --device "$device" --json "$work/bench.json")
measure+=(${memory[@]+"${memory[@]}"})
if [ "$device" = cpu ]; then
  measure+=(--size-mb 64 --rounds 1 --parameters 2000000)
elif [ -n "$quick" ]; then
  measure+=(--size-mb 512 --rounds 1 --parameters 100000000)
fi
budget_s=$(($(left_s) - 35))
if [ -n "$quick" ] && [ "$budget_s" -gt 130 ]; then
  budget_s=130
fi
stage measure "$(($(left_s) - 12))" "${measure[@]}" --budget "$budget_s"

# --- results
gpu=$(head -n 1 "$work/nvidia-smi" 2> /dev/null | cut -d, -f1 | tr '[:upper:]' '[:lower:]' | tr -cs '[:alnum:]\n' '-')
name=gpu-$(date -u +%Y%m%d-%H%M)-${gpu:-none}
if ! "$python" "$repository/benchmarks/gpu_report.py" "$work" "$name" "$results" ${out:+"$out"}; then
  cat "$work/stages.tsv" "$work/bench.json"
fi
where=$results/$name.md
if [ "$results" = "$work/results" ]; then # it goes with the rest
  cat "$results/$name.json"
  printf '\n'
  where='all there is of results is above'
fi
if [ -n "$out" ]; then
  tail -n +1 "$work"/logs/*.log > "$out/$name.log"
fi
echo "=== $SECONDS s in all; $where"
awk -F '\t' '$2 != 0 { failed = 1 } END { exit failed }' "$work/stages.tsv"
