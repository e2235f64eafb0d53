#!/usr/bin/env bash
# Debian packages that tests need besides .venv: Chromium for those of the page, Prometheus for those of its metrics.
# Installs what is absent, as root. Called by .ci/run.
set -euo pipefail
absent=()
for package in chromium prometheus; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || absent+=("$package")
done
[ ${#absent[@]} -gt 0 ] || exit 0
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${absent[@]}"
