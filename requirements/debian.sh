#!/usr/bin/env bash
# Debian packages whose programs the tests need, each called as its package is. Installs those that are absent, as root
# or by sudo, and starts none of their services. Called by .ci/run.
set -euo pipefail

packages=(chromium prometheus)

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

debian_package() { command -v "$1" >/dev/null || missing+=("$1"); }

missing=()
for package in "${packages[@]}"; do debian_package "$package"; done
[ "${#missing[@]}" -gt 0 ] || exit 0

policy=/usr/sbin/policy-rc.d  # Debian asks it before a package starts its service
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' | as_root install -m 755 /dev/stdin "$policy"
  trap 'as_root rm -f "$policy"' EXIT
fi
as_root apt-get update -q
as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
