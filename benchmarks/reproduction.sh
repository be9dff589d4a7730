#!/bin/bash
# `mergestream reproduce` on one GPU: PACS, killed twice and resumed; `pool statistics` for ViT-B/16; then MIDOG, cost and
# figures in what is left of BUDGET seconds. From the repository root:
#     IN=folder OUT=logs WORK=scratch bash benchmarks/reproduction.sh
# IN holds pacs-128.zip, midog25-64.zip and vit_s.safetensors. benchmarks/reproduction.py makes the record of OUT.
set -u
: "$IN" "$OUT" "$WORK"
export PYTHONPATH=$PWD/src HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1 COLUMNS=160 TERM=dumb
PY=${PY:-python3}
BUDGET=${BUDGET:-560}                      # seconds for everything
NET=${NET:-vit_small_patch14_dinov2}; NET_ARGS=${NET_ARGS:-img_size=126}; INIT=${INIT:-$IN/vit_s.safetensors}
STEPS=${STEPS:-300}; SETTINGS=${SETTINGS:-learning_rate=3e-5|1e-5}; SEEDS=${SEEDS:-0,1}
JOBS=${JOBS:-8}; DEVICE=${DEVICE:-auto}; KILL_FITS=${KILL_FITS:-4}; KILL_RUNS=${KILL_RUNS:-60}
B_NET=${B_NET:-vit_base_patch16_224}; B_ARGS=${B_ARGS:-}; B_COUNTS=${B_COUNTS:-}
MIDOG_NEEDS=${MIDOG_NEEDS:-150}            # MIDOG is started only if so many seconds are left
MORE_NEEDS=${MORE_NEEDS:-110}
mkdir -p "$OUT" "$WORK/data"
T0=$(date +%s%N)
now() { echo $(( ($(date +%s%N) - T0) / 1000000 )); }
stamp() { while IFS= read -r line; do local ms; ms=$(now); printf '%4d.%d %s\n' $((ms / 1000)) $((ms % 1000 / 100)) "$line"; done; }
S=$OUT/summary.log; : >"$S"
say() { echo "$*" | stamp | tee -a "$S"; }
ln -sfn "$IN/pacs-128.zip" "$WORK/data/pacs.zip"; ln -sfn "$IN/midog25-64.zip" "$WORK/data/midog.zip"
R=$WORK/repro

cat >"$WORK/finished_work.py" <<'P'
"""state.py save FILE | check FILE: what is finished in a reproduction, and that none of it was written again."""
import json, sys
from pathlib import Path
root, verb, file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
KINDS = {
    "fits": "pools/*.work/candidates/*/weights.safetensors",
    "experts": "pools/*-[0-9]/*/weights.safetensors",
    "statistics": "pools/*-[0-9]/*/statistics.safetensors",
    "decoded": "cache/images/*.npy",
    "logits": "cache/logits/*.npy",
    "runs": "runs/[0-9a-f]*/run.json",
}
now = {k: {str(p): (s := p.stat()).st_mtime_ns for p in sorted(root.glob(g)) if (s := p.stat())} for k, g in KINDS.items()}
print("  finished:", ", ".join(f"{len(v)} {k}" for k, v in now.items()))
if verb == "save":
    file.write_text(json.dumps(now))
else:
    bad = 0
    for kind, old in json.loads(file.read_text()).items():
        same = sum(now[kind].get(p) == t for p, t in old.items())
        if kind == "statistics" and len(old) < len(now[kind]):
            kind += " (files grow while kinds are added)"
        elif same != len(old):
            bad += 1
        print(f"  {kind}: {same} of {len(old)} unchanged since the kill, now {len(now[kind.split(' ')[0]])}")
    print("  REPEATED WORK" if bad else "  OK: nothing that was finished was written again")
P

cat >"$WORK/stage_times.py" <<'P'
"""stages.py FOLDER: seconds of each stage, from the times at which its files were written."""
import sys
from pathlib import Path
root = Path(sys.argv[1])
stages = {"decoded images": "cache/images/*.npy", "fits": "pools/*.work/candidates/*/expert.json", "statistics": "pools/*-[0-9]/*/statistics.safetensors", "experts' logits": "cache/logits/*.npy", "runs": "runs/[0-9a-f]*/run.json", "record": "reproduction.json", "page": "reproduction.html"}
all_times = sorted((p.stat().st_mtime, name) for name, g in stages.items() for p in root.glob(g))
first = all_times[0][0] if all_times else 0
for name, g in stages.items():
    t = sorted(p.stat().st_mtime - first for p in root.glob(g))
    if t:
        print(f"  {name:16} {len(t):4} files, from {t[0]:6.1f} to {t[-1]:6.1f} s")
P

reproduce() {  # sets, parts -> sets PID
  say "start: reproduce --sets $1 --only ${2:-table1}"
  $PY -m mergestream reproduce --data "$WORK/data" --out "$R" --only "${2:-table1}" --sets "$1" --backbones "$NET" $(for a in $NET_ARGS; do echo --arg "$a"; done) \
    --init "$INIT" --settings "$SETTINGS" --steps "$STEPS" --seeds "$SEEDS" --jobs "$JOBS" --device "$DEVICE" \
    > >(stamp >>"$OUT/reproduce.log") 2>&1 &
  PID=$!
}
count() { compgen -G "$1" | wc -l; }
kill_when() {  # pattern, number, seconds to wait at most
  local end=$(( $(now) + $3 * 1000 ))
  while kill -0 $PID 2>/dev/null && [ "$(now)" -lt $end ] && [ "$(count "$1")" -lt "$2" ]; do sleep 0.1; done
  if kill -0 $PID 2>/dev/null; then kill -9 $PID; wait $PID 2>/dev/null; say "SIGKILL with $(count "$1") finished of $1"; else say "ended before the kill: $1"; fi
  sleep 0.5
}
finish() {  # seconds to wait at most
  local end=$(( $(now) + $1 * 1000 ))
  while kill -0 $PID 2>/dev/null && [ "$(now)" -lt $end ]; do sleep 0.2; done
  if kill -0 $PID 2>/dev/null; then say "TIME IS UP: killed"; kill -9 $PID; fi
  wait $PID; CODE=$?; say "exit code $CODE"
}
left() { echo $(( BUDGET - $(now) / 1000 )); }
pack() {
  (cd "$R" && tar czf "$OUT/results.tar.gz" reproduction.json reproduction.html tables figures $(ls -d fig2 fig3 2>/dev/null) pools/*/*/expert.json pools/*.work/candidates.json 2>>"$OUT/pack.log"
   find runs -mindepth 1 -maxdepth 1 -type d -newer "$WORK/data" >"$WORK/new_runs"
   touch "$WORK/data"
   [ -s "$WORK/new_runs" ] || exit
   for less in --exclude=nothing --exclude=steps.jsonl; do  # a file of more than 16 MiB would not come back
     tar czf "$WORK/runs.tar.gz" "$less" -T "$WORK/new_runs" 2>>"$OUT/pack.log"
     [ "$(stat -c %s "$WORK/runs.tar.gz")" -lt 16000000 ] && cp "$WORK/runs.tar.gz" "$OUT/runs_$1.tar.gz" && break
   done)
}

$PY -c "import torch, timm, sys; print(sys.version.split()[0], torch.__version__, timm.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')" 2>&1 | stamp | tee -a "$S"
for module in jinja2 torchmetrics yaml matplotlib rich typer; do $PY -c "import $module" 2>/dev/null || say "MISSING MODULE $module"; done
nproc | stamp >>"$S"; free -g | stamp >>"$S"; df -h "$WORK" | stamp >>"$S"

say "=== (a) table1 on PACS, killed twice"
reproduce pacs
kill_when "$R/pools/*.work/candidates/*/expert.json" "$KILL_FITS" 150
$PY "$WORK/finished_work.py" "$R" save "$WORK/kill1.json" | stamp | tee -a "$S"
reproduce pacs
kill_when "$R/runs/[0-9a-f]*/run.json" "$KILL_RUNS" 240
$PY "$WORK/finished_work.py" "$R" check "$WORK/kill1.json" | stamp | tee -a "$S"
$PY "$WORK/finished_work.py" "$R" save "$WORK/kill2.json" | stamp | tee -a "$S"
reproduce pacs
finish 240
$PY "$WORK/finished_work.py" "$R" check "$WORK/kill2.json" | stamp | tee -a "$S"
$PY "$WORK/stage_times.py" "$R" | stamp | tee -a "$S"
$PY "$WORK/finished_work.py" "$R" save "$WORK/done.json" >/dev/null
pack pacs; say "packed: $(ls -l "$OUT" | awk '{print $9, $5}' | tr '\n' ' ')"

say "=== (b) statistics of $B_NET"
B=$WORK/pool_b
$PY -m mergestream train --dataset pacs --root "$WORK/data/pacs.zip" --network "$B_NET" $(for a in $B_ARGS; do echo --arg "$a"; done) --init random --steps 3 --validate-every 3 --out "$B" --jobs 1 2>&1 | stamp >>"$OUT/statistics.log"
say "pool of $(count "$B/*/weights.safetensors") folders"
cat >"$WORK/timed_command.py" <<'P'
"""The command `mergestream pool statistics`, with the seconds of each stage."""
import sys, time
from contextlib import contextmanager
import torch
from mergestream.cli import pool_experts as command
def timed(**_):
    @contextmanager
    def track(title, total):
        began, done = time.perf_counter(), [0]
        def advance(steps=1, note=""):
            done[0] += steps
        yield advance
        print(f"  {title}: {time.perf_counter() - began:.1f} s, {done[0]} of {total} steps", flush=True)
    return track
command.progress = timed
from mergestream.training import pool_statistics
write = pool_statistics._Results.write
def timed_write(self):
    began = time.perf_counter()
    write(self)
    print(f"  writing: {time.perf_counter() - began:.1f} s", flush=True)
pool_statistics._Results.write = timed_write
from mergestream.cli.app import app
began = time.perf_counter()
try:
    app(args=sys.argv[1:], prog_name="mergestream", standalone_mode=False)
finally:
    print(f"  whole command: {time.perf_counter() - began:.1f} s", flush=True)
    if torch.cuda.is_available():
        print(f"  peak GPU memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)
P
say "start: pool statistics $B_COUNTS"
timeout -s KILL "$(( $(left) > 20 ? $(left) : 20 ))" $PY "$WORK/timed_command.py" pool statistics "$B" --dataset pacs --root "$WORK/data/pacs.zip" --device "$DEVICE" $B_COUNTS 2>&1 | stamp | tee -a "$OUT/statistics.log" >>"$S"
say "statistics: $(ls -l "$B"/*/statistics.safetensors 2>/dev/null | awk '{s+=$5} END {print NR, "files,", s/1e9, "GB"}')"
cat >"$WORK/cpu_and_gpu.py" <<'P'
"""Statistics of the PACS pool on both devices: how far are they apart?"""
import sys
from pathlib import Path
import torch
import mergestream as ms
folder = next(Path(sys.argv[1]).glob("pools/pacs-*-[0-9]"))
rows = {}
for device in ("cpu", "cuda" if torch.cuda.is_available() else "cpu"):
    torch.set_num_threads(8)
    pool = ms.ExpertPool.load(folder, device=device)
    pool = pool.without(pool.names[0])
    images = {n: torch.randint(0, 256, (64, 3, *pool.preprocessing.size), dtype=torch.uint8, generator=torch.Generator().manual_seed(k)) for k, n in enumerate(pool.names)}
    measured = ms.measure_statistics(pool, images, ["gram", "fisher_mergelm", "gram_pp"], batch_size=32, ratio=1.0, ridge=0.01)
    rows[device] = rows.get(device, []) + [measured]
a, b = rows["cpu"][0], [r for v in rows.values() for r in v][-1]
for kind in ("gram", "fisher_mergelm", "gram_pp"):
    worst = 0.0
    for k in range(len(a)):
        one, two = a.statistics_of(k), b.statistics_of(k)
        for key in one.tensors:
            if key.startswith(kind + "/") or (kind == "gram_pp" and key.startswith("gram_pp-")):
                x, y = one.tensors[key].cpu().double(), two.tensors[key].cpu().double()
                worst = max(worst, float((x - y).norm() / x.norm().clamp_min(1e-30)))
    print(f"  {kind}: GPU and CPU differ by at most {worst:.1e} of a tensor's norm")
P
[ "$(left)" -gt 60 ] && timeout -s KILL 60 $PY "$WORK/cpu_and_gpu.py" "$R" 2>&1 | stamp | tee -a "$S"
rm -rf "$B" "$B.work"

say "=== MIDOG beside PACS, $(left) s left"
if [ "$(left)" -gt "$MIDOG_NEEDS" ]; then
  reproduce pacs,midog
  finish $(( $(left) - 15 ))
  $PY "$WORK/finished_work.py" "$R" check "$WORK/done.json" | stamp | tee -a "$S"
  $PY "$WORK/stage_times.py" "$R" | stamp | tee -a "$S"
  [ $CODE = 0 ] && pack midog
  if [ $CODE = 0 ] && [ "$(left)" -gt "$MORE_NEEDS" ]; then
    say "=== cost and figures, $(left) s left"
    reproduce pacs,midog "table1,fig2,$([ "$(left)" -gt $((MORE_NEEDS + 65)) ] && echo fig3,)fig5,cost"
    finish $(( $(left) - 10 ))
    [ $CODE = 0 ] && pack more
  fi
fi
say "=== end: $(ls -l "$OUT" | awk '{print $9, $5}' | tr '\n' ' ')"
