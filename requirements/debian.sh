#!/usr/bin/env bash
# Debian packages that the project needs and this system lacks. `make setup`, `make test` and `make verify` call it.
#
#   requirements/debian.sh setup [PYTHON]   a compiler, vLLM's library, and what Debian splits off from its Python
#   requirements/debian.sh test [PYTHON]    those, and a browser
#   requirements/debian.sh verify [PYTHON]  those, and the other programs that tests call
#
# Installs as root or by sudo, and starts no service. Where neither is allowed it ends with one line that names the packages.
# A system that is no Debian is named what it lacks; `make setup` goes on there, as it may have them under other names.
set -euo pipefail

missing=()
PATH=$PATH:/usr/sbin:/sbin  # where tc and ip are, which ordinary users' PATH lacks

program() {  # program NAME PACKAGE
  command -v "$1" >/dev/null || [[ " ${missing[*]-} " == *" $2 "* ]] || missing+=("$2")
}

python_parts() {  # python_parts PYTHON
  local path; path=$(command -v "$1") && [[ $path == /usr/bin/* ]] || return 0  # another's Python is not in Debian's packages
  "$1" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
  [ -e "$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || missing+=(python3-dev)
}

case ${1:-} in setup | test | verify) ;; *) echo "usage: $0 setup|test|verify [PYTHON]" >&2; exit 2 ;; esac
program g++ g++  # pycosat comes as source; torch and vLLM compile layers
python_parts "${2:-python3}"
if [ -z "${VARIANT:-}" ]; then
  if nvidia-smi >/dev/null 2>&1; then VARIANT=gpu; else VARIANT=cpu; fi
fi
if [ "$VARIANT" = cpu ]; then  # vLLM's CPU build loads it
  "${2:-python3}" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing+=(libnuma1)
fi
[ "$1" = setup ] || program chromium chromium
if [ "$1" = verify ]; then
  program prometheus prometheus
  program umoci umoci
  program ip iproute2
  program tc iproute2
fi
[ "${#missing[@]}" -gt 0 ] || exit 0

install=(apt-get install -y --no-install-recommends "${missing[@]}")
fail() { printf 'make %s needs Debian packages that are missing, and %s. As root: %s\n' "$what" "$1" "${install[*]}" >&2; exit 2; }
what=$1

if ! command -v apt-get >/dev/null; then
  [ "$what" = setup ] || fail "there is no apt-get here"
  echo "setup: this system may lack ${missing[*]} (Debian's names). Going on: install them by its own packages if what follows fails"
  exit 0
fi
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || fail "this user is neither root nor has sudo"
  sudo -n true 2>/dev/null || { [ -t 0 ] && sudo true; } || fail "sudo refuses this user"
  as_root=(sudo)
fi

policy=/usr/sbin/policy-rc.d  # Debian asks it before a package starts its service
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" install -m 755 /dev/stdin "$policy"
  trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
echo "$what: installs the Debian packages ${missing[*]}"
"${as_root[@]}" apt-get update -q || fail "apt-get update failed"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "${install[@]}" -q || fail "their installation failed"
