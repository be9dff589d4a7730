#!/bin/sh
# Backup of the state folder while the service runs:  backup.sh STATE DESTINATION PUBLIC_KEY
# States are copied before the log, because each names a line that must be in the log. The copy is verified before it
# gets its name. Keep the anchors on another machine: they show whether lines were cut off later.
set -eu
if [ "$#" -ne 3 ]; then
    echo "usage: $0 STATE DESTINATION PUBLIC_KEY" >&2
    exit 2
fi
state=$1 destination=$2 key=$3
copy="$destination/$(date -u +%Y%m%dT%H%M%SZ)"
umask 077
mkdir -p "$destination"
mkdir "$copy.part"
trap 'rm -rf "$copy.part"' EXIT
outbox=dicom/outbox/outbox.sqlite # copied by SQLite itself, which knows what is being written
if [ -f "$state/$outbox" ]; then
    mkdir -p "$copy.part/dicom/outbox"
    python3 -c "import sqlite3, sys; sqlite3.connect(sys.argv[1]).backup(sqlite3.connect(sys.argv[2]))" \
        "$state/$outbox" "$copy.part/$outbox"
fi
(cd "$state" && tar --exclude='./audit.jsonl*' --exclude='*.sqlite*' --exclude='*.new' --warning=no-file-changed -cf - .) | tar -xf - -C "$copy.part"
cp -p "$state"/audit.jsonl* "$copy.part/"
mergestream audit verify "$copy.part/audit.jsonl" --key "$key"
mergestream audit head "$copy.part/audit.jsonl" > "$copy.anchor.json"
mv "$copy.part" "$copy"
echo "$copy"
