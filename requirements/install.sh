#!/usr/bin/env bash
# Makes or updates .venv from the lock that suits this machine. Called by `make setup`; done again, it costs milliseconds.
#
#   PYTHON=python3.12 make setup     another interpreter (default: the first Python >= 3.11 found)
#   VARIANT=cpu make setup           the CPU lock on a machine with a GPU
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

fail() {
  [ ! -f "${log:-}" ] || grep -v '^WARNING: Location' "$log" | tail -n 15 >&2
  printf '\nsetup: %s\n' "$*" >&2
  exit 2
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$candidate"; return; fi
  done
  fail "needs Python 3.11 or newer; found $("${PYTHON:-python3}" --version 2>&1 || echo none). On Debian: apt install python3 python3-venv. Another interpreter: PYTHON=/path/to/python3.12 make setup"
}

make_venv() {
  "$python" -m venv --clear .venv || fail "$python cannot make a virtual environment. On Debian: apt install python3-venv"
}

log=.venv/setup.log

pip_install() { .venv/bin/python -m pip install --disable-pip-version-check --no-deps "$@" >>"$log" 2>&1; }

watched() {  # runs a command; meanwhile a terminal shows how far it is
  "$@" &
  watched_process=$!
  local begun=$SECONDS
  trap 'kill "$watched_process" 2>/dev/null || true' EXIT  # a background process does not hear Ctrl-C
  while [ -t 1 ] && kill -0 "$watched_process" 2>/dev/null; do
    printf '\r  %d s, %d of %d packages fetched ' $((SECONDS - begun)) "$(grep -c '^Collecting' "$log" || true)" "$(grep -c '==' "$lock")"
    sleep 1
  done
  [ ! -t 1 ] || printf '\r\033[K'
  trap - EXIT
  wait "$watched_process"
}

install_torch() {  # the CPU build is not on PyPI: where pip is configured with a place that has it, else from PyTorch's own index
  local pin; pin=$(grep '^torch==' "$lock")
  [ "$variant" = cpu ] || { pip_install "$pin"; return; }
  pip_install "$pin" || pip_install --extra-index-url "$TORCH_CPU_INDEX" "$pin" ||
    fail "$pin: not found where pip looks, nor at $TORCH_CPU_INDEX (no network?). Give pip a place that has it: PIP_FIND_LINKS=DIRECTORY make setup"
}

LEAST_DRIVER=580  # of CUDA 13, which the pinned torch is built for

check_driver() {
  local driver; driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || true
  [ -n "$driver" ] || { echo "setup: nvidia-smi names no driver here; GPUs need driver $LEAST_DRIVER or newer"; return; }
  [ "${driver%%.*}" -ge "$LEAST_DRIVER" ] ||
    fail "the NVIDIA driver is $driver, and CUDA 13 needs $LEAST_DRIVER or newer. Update the driver, or install without GPUs: VARIANT=cpu make setup"
}

compare_gpus() {  # what the driver lists with what torch can use
  local listed usable
  listed=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
  usable=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())' 2>>"$log") || usable=0
  [ "$listed" = "$usable" ] || echo "setup: the driver lists $listed GPU(s), torch can use $usable. Look at CUDA_VISIBLE_DEVICES, at the container's devices, and at what this prints: .venv/bin/python -c 'import torch; torch.cuda.init()'"
}

allow_torchvision() {  # every process imports it at its start: see the file
  local site; site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  cp requirements/torchvision_on_cpu.py "$site"
  echo 'import torchvision_on_cpu' >"$site/torchvision_on_cpu.pth"
}

if [ -z "${VARIANT:-}" ]; then
  if nvidia-smi >/dev/null 2>&1; then VARIANT=gpu; else VARIANT=cpu; fi
fi
variant=$VARIANT
lock=requirements/$variant.lock
[ -f "$lock" ] || fail "VARIANT=$variant: there is no $lock. Known: cpu, gpu"

# Two stamps: the lock changes seldom and costs minutes, the project's own metadata costs a second. The path is part of the
# second one because an editable install points to where the checkout was.
lock_stamp=.venv/.locked-$(sha256sum "$lock" | cut -c1-16)
project_stamp=.venv/.project-$( (cat pyproject.toml requirements/torchvision_on_cpu.py; pwd) | sha256sum | cut -c1-16)
if [ -f "$lock_stamp" ] && [ -f "$project_stamp" ]; then exit 0; fi

start=$SECONDS
[ "$variant" != gpu ] || check_driver
python=$(find_python)
VARIANT=$variant requirements/debian.sh setup "$python"
.venv/bin/python -c 'import pip' 2>/dev/null || make_venv
if [ ! -f "$lock_stamp" ]; then
  echo "setup: $(grep -c '==' "$lock") pinned packages of $lock into .venv; takes two to three minutes and 3.6 GB (GPU: some minutes more)"
  : >"$log"
  install_torch
  watched pip_install -r "$lock" || fail "installing $lock failed, the end of $log is above. The pins are for Linux x86-64 and Python 3.11; after mending, run it again: what is done is kept"
fi
pip_install --no-build-isolation --editable . || fail "installing the project itself failed, the end of $log is above"
if [ "$variant" = cpu ]; then allow_torchvision; else compare_gpus; fi
rm -f .venv/.locked-* .venv/.project-*
touch "$lock_stamp" "$project_stamp"
echo "setup: done in $((SECONDS - start)) s, $(du -sh .venv | cut -f1) in .venv"
