"""Peak memory of loading a pool, against reading all experts with safetensors and stacking them.

    python benchmarks/load_memory.py --out benchmarks/results/load_memory.json

Each way runs in a process of its own. Figure: (peak memory - memory after imports) / (K x P x bytes per parameter).
Linux only: the peak is the kernel's VmHWM, reset after the imports.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

OURS = """
pool = ms.ExpertPool.load(folder)
size = pool.bank.nbytes
"""
RIVAL = """
states = [load_file(path) for path in sorted(Path(folder).glob("*/weights.safetensors"))]
bank = torch.stack([torch.cat([tensor.flatten() for tensor in state.values()]) for state in states])
size = bank.nbytes
"""
MEASURE = """
import sys, time
from pathlib import Path
import timm, torch, mergestream as ms
from safetensors.torch import load_file
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
folder = sys.argv[1]
open("/proc/self/clear_refs", "w").write("5")
before, start = status("VmRSS"), time.perf_counter()
{work}
print((status("VmHWM") - before) / size, time.perf_counter() - start, size)
"""


def write_pool(folder: Path, network: str, experts: int) -> None:
    import torch

    from mergestream.networks.architecture import create_network
    from mergestream.pool.checkpoint import write_expert
    from mergestream.pool.expert_card import ExpertCard

    classes = ("a", "b", "c", "d", "e", "f", "g")
    for number in range(experts):
        torch.manual_seed(number)
        built = create_network(network, num_classes=len(classes))
        card = ExpertCard.for_network(f"expert{number}", built, classes)
        write_expert(folder / card.name, built.module.state_dict(), card)


def measure(work: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-c", MEASURE.format(work=work), str(folder)]
    peak, seconds, size = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return {"peak_ratio": round(float(peak), 3), "seconds": round(float(seconds), 2), "bank_bytes": int(size)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="vit_base_patch32_224")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_pool(Path(name), options.network, options.experts)
        result = {
            "network": options.network,
            "experts": options.experts,
            "dtype": "float32",
            "mergestream": measure(OURS, Path(name)),
            "safetensors_then_stack": measure(RIVAL, Path(name)),
            "command": " ".join(["python", *sys.argv]),
            "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
            "machine": f"{platform.machine()}, {platform.system()}",
        }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
