"""Numbers of the published implementations, made once by tests/golden/make_fusion_bench.py and pinned in a file.

The networks are small CLIP vision towers with a linear head. FusionBench's settings can be chosen by options; where it
should not be followed, a test says so.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import mergestream as ms

GOLDEN = Path(__file__).parent / "golden" / "fusion_bench.safetensors"
EXPERTS = ("a", "b", "c")


class Tower(nn.Module):
    def __init__(self, config: dict) -> None:
        from transformers import CLIPVisionConfig, CLIPVisionModel

        super().__init__()
        self.vision_model = CLIPVisionModel(CLIPVisionConfig(**config))
        self.fc = nn.Linear(config["hidden_size"], 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.vision_model(images).pooler_output)


@cache
def golden() -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(str(GOLDEN), framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def part(prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in golden()[0].items() if key.startswith(prefix)}


@cache
def pool() -> ms.ExpertPool:
    about = golden()[1]
    plain = ms.ExpertPool.from_state_dicts(
        {name: part(f"expert/{name}/") for name in EXPERTS},
        Tower(json.loads(about["config"])),
        base=part("base/"),
        head="fc",
        preprocessing=ms.Preprocessing(size=(16, 16)),
    )
    images = {name: golden()[0][f"images/{name}"] for name in EXPERTS}
    kinds = ["gram", "fisher_mergelm", "gram_pp"]
    batch = int(about["batch"])
    # FusionBench's RegMean++ has no ridge and no convolutions.
    return ms.measure_statistics(plain, images, kinds, batch_size=batch, ratio=0.9, ridge=0.0, convolutions=False)


def merged(name: str, **options) -> dict[str, Tensor]:
    method = ms.create_method(name, pool(), **options)
    return pool().layout.views(method.merged_weights())


def test_the_file_says_which_versions_made_it() -> None:
    assert json.loads(golden()[1]["versions"])["fusion-bench"] == "0.2.33"


@pytest.mark.parametrize(
    ("published", "name", "options", "tolerance"),
    [
        ("simple_average", "mean", {}, 1e-6),
        ("task_arithmetic", "task_arithmetic", {}, 1e-6),
        ("ties_mean", "ties", {}, 1e-6),
        ("ties_sum", "ties", {"merge": "sum"}, 1e-6),
        ("ties_max", "ties", {"merge": "max"}, 1e-6),
        ("fisher", "fisher", {"fisher": "mergelm"}, 1e-4),
        ("regmean", "regmean", {"ratio": 0.9, "convolutions": False}, 1e-4),
    ],
)
def test_merged_weights_are_the_published_ones(published: str, name: str, options: dict, tolerance: float) -> None:
    theirs, ours = part(f"result/{published}/"), merged(name, **options)
    assert set(theirs) == set(ours)
    distance = {key: (theirs[key] - ours[key]).abs().max().item() for key in theirs}
    assert max(distance.values()) < tolerance, max(distance, key=distance.get)
    # A test that compares nothing would pass too: the results are not each other's.
    mean = part("result/simple_average/")
    if published != "simple_average":
        assert max((theirs[key] - mean[key]).abs().max().item() for key in theirs) > 100 * tolerance


def test_regmean_pp_is_the_published_one_in_every_block() -> None:
    theirs = part("result/regmean_plusplus/")
    ours = merged("regmean_pp", ratio=0.9, ridge=0.0, convolutions=False)
    mean, base = part("result/simple_average/"), part("base/")
    blocks = [key for key in theirs if ".encoder.layers." in key]
    assert len(blocks) == 32
    for key in blocks:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-4)
    before = [key for key in theirs if ".embeddings." in key or "pre_layrnorm" in key]
    for key in before:
        torch.testing.assert_close(ours[key], theirs[key])
    # Behind the blocks FusionBench leaves the pretrained weights; there is one label space here, so ours merges them.
    behind = set(theirs) - set(blocks) - set(before)
    assert behind == {"vision_model.post_layernorm.weight", "vision_model.post_layernorm.bias", "fc.weight", "fc.bias"}
    for key in behind:
        assert torch.equal(theirs[key], base[key])
        assert not torch.allclose(ours[key], base[key])
    torch.testing.assert_close(ours["vision_model.post_layernorm.weight"], mean["vision_model.post_layernorm.weight"])
    assert not torch.allclose(ours["fc.weight"], mean["fc.weight"])
