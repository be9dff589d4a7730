"""Real experts that a CPU can train: the first blocks of a ViT are computed once, the last three and a head fitted."""

import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from mergestream.data.datasets.data_request import DataRequest, open_data
from mergestream.methods import ORIGINAL
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.files import sha256_of_file
from mergestream.runtime.seeding import seeded

NETWORK, SIZE, FIRST_BLOCKS = "vit_small_patch14_dinov2", 70, 9
STEPS, WARM_UP, BATCH, LEARNING_RATE, DECAY = 200, 20, 64, 5e-5, 1e-4
SEED_OF_HEADS = 100
VIEW = "hflip"


def kept_in(out: Path, root: Path, init: Path) -> Path:
    """Where tokens and experts of these images, weights and settings lie: others never meet them."""
    settings = (NETWORK, SIZE, FIRST_BLOCKS, STEPS, WARM_UP, BATCH, LEARNING_RATE, DECAY)
    made = hashlib.sha256(repr((settings, sha256_of_file(root), sha256_of_file(init))).encode()).hexdigest()
    return out / made[:12]


@dataclass(frozen=True)
class Site:
    """One domain: tokens after the first blocks as pictures [N,D,1,T], by view, and labels."""

    tokens: dict[str, Tensor]
    labels: Tensor
    classes: tuple[str, ...]

    def some(self, chosen: Tensor) -> "Site":
        return Site({view: t[chosen] for view, t in self.tokens.items()}, self.labels[chosen], self.classes)


class Tail(nn.Module):
    """The last blocks, the norm and the head."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = network.blocks[FIRST_BLOCKS:], network.norm, network.head

    def forward(self, images: Tensor) -> Tensor:
        tokens = images.flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])  # type: ignore[no-any-return]


def whole(init: Path, classes: int, seed: int = SEED_OF_HEADS) -> Any:
    """The network with the pretrained encoder and a head of its own."""
    with seeded(seed):
        network = timm.create_model(NETWORK, img_size=SIZE, num_classes=classes)
    weights = {name: tensor for name, tensor in load_file(init).items() if not name.startswith("head.")}
    grid = network.patch_embed.grid_size
    weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], new_size=list(grid), num_prefix_tokens=1)
    network.load_state_dict(weights, strict=False)
    return network.eval()


@torch.no_grad()
def sites(dataset: str, root: Path, init: Path, out: Path) -> dict[str, Site]:
    """Every domain's tokens, computed once and kept."""
    kept = out / f"{dataset}-tokens.pt"
    preprocessing = Preprocessing((SIZE, SIZE), "bicubic")
    data = open_data(DataRequest(dataset, str(root)), preprocessing, out / "data")
    if not kept.exists():
        network, found = whole(init, 1), {}
        for name in data.domains:
            images = data[name].batch(torch.arange(len(data[name])))
            parts = [_first_blocks(network, preprocessing(part)) for part in images.split(128)]
            found[name] = {view: torch.cat([part[view] for part in parts]) for view in (ORIGINAL, VIEW)}
            print(f"{name}: {len(images)} images", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        torch.save(found, kept)
    return {n: Site(t, data[n].labels, tuple(data[n].classes)) for n, t in torch.load(kept).items()}


def _first_blocks(network: Any, images: Tensor) -> dict[str, Tensor]:
    found = {}
    with torch.autocast("cpu", torch.bfloat16):
        for view, shown in ((ORIGINAL, images), (VIEW, images.flip(-1))):
            tokens = network._pos_embed(network.patch_embed(shown))
            for block in network.blocks[:FIRST_BLOCKS]:
                tokens = block(tokens)
            found[view] = tokens.to(torch.bfloat16).transpose(1, 2)[:, :, None]
    return found


def fit(site: Site, domain: str, start: str, init: Path, *, weighted: bool, seed: int) -> dict[str, Any]:
    """One expert: its weights, temperature and mean probability on a fifth of its images that it was not shown."""
    count = len(site.classes)
    network = Tail(whole(init, count, SEED_OF_HEADS + seed))
    if start == "independent":
        own = whole(init, count, zlib.crc32(f"{domain}:{seed}".encode()))
        network.head.load_state_dict(own.head.state_dict())
    random = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(site.labels), generator=random)
    held, used = shuffled[: len(shuffled) // 5], shuffled[len(shuffled) // 5 :]
    counts = torch.bincount(site.labels[used], minlength=count)
    weight = counts.sum() / (count * counts.float()) if weighted else None
    optimiser = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, _rate)
    network.train()
    for _ in range(STEPS):
        batch = used[torch.randint(len(used), (BATCH,), generator=random)]
        flipped = (torch.rand(BATCH, generator=random) < 0.5)[:, None, None, None]
        shown = torch.where(flipped, site.tokens[VIEW][batch], site.tokens[ORIGINAL][batch]).float()
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(shown)
        loss = nn.functional.cross_entropy(logits.float(), site.labels[batch], weight=weight)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    said, truth = answers(network.eval(), site.tokens[ORIGINAL][held]), site.labels[held]
    mean = torch.softmax(said, dim=1).mean(dim=0).tolist()
    return {
        "state": network.state_dict(),
        "temperature": _temperature(said, truth),
        "mean_probability": dict(zip(site.classes, mean, strict=True)),
        "counts": dict(zip(site.classes, counts.tolist(), strict=True)),
        "acc": float((said.argmax(dim=1) == truth).float().mean()),
    }


def _rate(step: int) -> float:
    return min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))


@torch.no_grad()
def answers(network: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.cat([network(part.float()).float() for part in tokens.split(256)])


def _temperature(logits: Tensor, labels: Tensor) -> float:
    value = torch.ones(1, requires_grad=True)
    optimiser = torch.optim.LBFGS([value], max_iter=50)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(logits / value.clamp_min(0.05), labels)
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    return float(value.detach().clamp_min(0.05))


def pool_of(experts: dict[str, dict[str, Any]], classes: tuple[str, ...], init: Path, *, weighted: bool) -> ExpertPool:
    """The experts as a pool whose images are tokens."""
    modules = {}
    for name, expert in experts.items():
        modules[name] = Tail(whole(init, len(classes)))
        modules[name].load_state_dict(expert["state"])
    pool = ExpertPool.from_modules(modules, classes=classes, head="head")
    for name, expert in experts.items():
        told = {"validation": {"mean_probability": expert["mean_probability"]}}
        about = {"temperature": expert["temperature"], "class_counts": expert["counts"], "metrics": told}
        pool = pool.annotate(name, domain=name, recipe={"loss": "weighted" if weighted else "plain"}, **about)
    return pool
