#!/bin/sh
# Debian's chromium, for tests/test_report_browser.py. Nothing is done where one is there already.
set -eu

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null 2>&1; then
        echo "There is a browser already: $(command -v "$name")"
        exit 0
    fi
done
if ! command -v apt-get >/dev/null 2>&1; then
    echo "This is not Debian or a relative of it (no apt-get): install chromium with your own package manager." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "Installing needs root. Run: sudo $0" >&2
    exit 1
fi
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium
