"""Three hospitals train experts from one base and share them; a fourth hospital merges them batch by batch.

    python examples/consortium.py

The data are the synthetic phantom hospitals. No image leaves its hospital; only folders of weights do.
"""

from pathlib import Path
from tempfile import mkdtemp

import mergestream as ms
from mergestream.pool.exchange.changes import add_expert
from mergestream.training import Recipe, train_expert, write_start

hospitals = ms.load_dataset("phantom", images=200)
here = Path(mkdtemp())

# 1. The consortium agrees on a base: an architecture, initial weights, one head for all.
small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
write_start(here / "pool" / "base", "vit_tiny_patch16_224", small, hospitals.classes, None, "shared", seed=0)

# 2. Each hospital trains on its own images and sends one folder, which is checked before it joins the pool.
recipe = Recipe(steps=150, batch_size=32, learning_rate=1e-3, augmentation=0, validate_every=50, accelerator="cpu")
for site in ("lyon", "brest", "turin"):
    card = train_expert(here / site / site, here / "pool" / "base", hospitals[site], recipe)
    print(f"{site} trained: {card.metrics['validation']['accuracy']:.0%} at home")
    accepted = add_expert(here / "pool", here / site / site)
    print(*accepted.warnings, sep="\n", end="")

# 3. A fourth hospital has no labels, only images that arrive in batches.
pool = ms.ExpertPool.load(here / "pool")
method = ms.create_method("entropy_adaptive", pool)
graz = hospitals["graz"]
stream = ms.streams.create_stream("temporal", graz.labels, batch_size=50, acquired=graz.acquired)
for number, batch in enumerate(stream, start=1):
    step = method.step(graz.batch(batch))
    shares = ", ".join(f"{name} {share:.2f}" for name, share in zip(pool.names, step.encoder_coefficients, strict=True))
    print(f"batch {number}: encoder from {shares}; head expert {step.head_expert}")
