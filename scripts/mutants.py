"""Change one expression of a core function at a time and see that a test fails: python scripts/mutants.py [WORD].

Each mutant runs on a copy of the source, so the checkout stays as it is. Exits with 1 if a mutant survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCORES, COEFFICIENTS = "functional/scores.py", "functional/coefficients.py"
MERGING, CLASS_MIX, HEAD_FIT = "functional/merging", "functional/class_mix.py", "functional/head_fit.py"
REFERENCES = ("test_properties.py", "test_reference_step.py", "test_golden.py")
# Function, file, expression, its replacement, tests that must notice.
MUTANTS = (
    ("entropy", SCORES, "torch.where(p > 0, p * log_p, 0)", "torch.where(p > 0, p * log_p * 1.01, 0)", REFERENCES),
    ("max_softmax", SCORES, ".amax(dim=-1), shares)", ".amin(dim=-1), shares)", REFERENCES),
    ("entropy_agreement", SCORES, "clamp_min(LEAST_AGREEMENT) ** 4", "clamp_min(LEAST_AGREEMENT) ** 3", REFERENCES),
    ("consistency", SCORES, ".abs().sum(dim=-1) / 2", ".abs().sum(dim=-1)", REFERENCES),
    ("inverse", COEFFICIENTS, "return evidence / evidence.sum()", "return evidence / evidence.max()", REFERENCES),
    ("head_expert", COEFFICIENTS, "evidence * (1 + consistency)", "evidence * (1 - consistency)", REFERENCES),
    ("entropy_gap", COEFFICIENTS, "torch.softmax(-sharpness * gap", "torch.softmax(sharpness * gap", REFERENCES),
    ("select", COEFFICIENTS, "return nearest / nearest.sum()", "return nearest", REFERENCES),
    (
        "smooth",
        COEFFICIENTS,
        "momentum * previous + (1 - momentum)",
        "(1 - momentum) * previous + momentum",
        REFERENCES,
    ),
    (
        "merge",
        f"{MERGING}/weighted_sums.py",
        "weighted_sum(rows.head, head,",
        "weighted_sum(rows.head, encoder,",
        ("test_pool.py",),
    ),
    ("weighted_sum", f"{MERGING}/weighted_sums.py", "alpha=c)", "alpha=c * 1.001)", REFERENCES),
    (
        "fisher_average",
        f"{MERGING}/weighted_sums.py",
        "weights / weights.sum(dim=0)",
        "weights / weights.mean(dim=0)",
        ("test_merging.py", "test_baselines.py"),
    ),
    (
        "regression_mean",
        f"{MERGING}/regmean.py",
        "shrunk = gram * ratio",
        "shrunk = gram * 1.0",
        ("test_merging.py", "test_baselines.py"),
    ),
    (
        "ties",
        f"{MERGING}/ties.py",
        "agreeing.amax(dim=0)",
        "agreeing.amin(dim=0)",
        ("test_merging.py", "test_baselines.py"),
    ),
    (
        "mix_of_batch",
        CLASS_MIX,
        "(images + concentration)\n",
        "(images + 1.1 * concentration)\n",
        ("test_class_mix.py", "test_golden.py"),
    ),
    (
        "fitted",
        HEAD_FIT,
        "ridge = before / sums[0, 0]",
        "ridge = 2 * before / sums[0, 0]",
        ("test_head_fit.py", "test_golden.py"),
    ),
)


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = [name for name, *mutant in MUTANTS if word in name and survives(name, *mutant)]
    print(f"{len(survivors)} of {len(MUTANTS)} mutants survived: {', '.join(survivors) or 'none'}")
    return bool(survivors)


def survives(name: str, file: str, expression: str, replacement: str, tests: tuple[str, ...]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "mergestream" / file
        text = path.read_text(encoding="utf-8")
        if text.count(expression) != 1:
            raise SystemExit(f"{file} holds '{expression}' {text.count(expression)} times, not once: mend the table.")
        path.write_text(text.replace(expression, replacement), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        command += ["-m", "not slow and not gpu", *(str(ROOT / "tests" / test) for test in tests)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    print(f"{name}: {failed[0].removeprefix('FAILED ')[:100] if failed else 'SURVIVED'}", flush=True)
    return done.returncode != 1


if __name__ == "__main__":
    sys.exit(main())
