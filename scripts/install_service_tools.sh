#!/bin/sh
# Debian's Orthanc, dcmtk and dicom3tools, the real counterparts of the DICOM tests, and Caddy and Prometheus, which
# tests of deploy/ start; pdflatex with booktabs, which compiles our tables (150 MB of disk). Nothing is done where they
# are there already.
set -eu

missing=""
for program in Orthanc storescu dciodvfy caddy prometheus pdflatex; do
    command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
done
if [ -z "$missing" ]; then
    echo "The tools are there already."
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "This is not Debian or a relative of it (no apt-get): install these yourself:$missing." >&2
    exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "Installing needs root. Run: sudo $0" >&2
    exit 1
fi
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
    orthanc orthanc-dicomweb dcmtk dicom3tools caddy prometheus texlive-latex-recommended
