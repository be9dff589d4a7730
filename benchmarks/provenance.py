"""What every result says of how it came about."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch


def provenance(device: str = "cpu") -> dict[str, str]:
    """Machine, versions, commit and command, without a machine's own paths.

    A copy of the working tree without its history is told its commit by the environment variable COMMIT.
    """
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "machine": torch.cuda.get_device_name() if torch.device(device).type == "cuda" else cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": os.environ.get("COMMIT") or asked.stdout.strip(),
        "command": " ".join(["python3", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]),
    }
