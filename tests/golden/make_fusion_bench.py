"""Write fusion_bench.safetensors: what FusionBench's own code makes of three small CLIP vision towers.

Not run by the tests, which only read the file. In an environment of its own, since it pins an old transformers: in
version 5 a layer returns a tensor where FusionBench takes the first element of a tuple, and so it drops all images but
one. Further repairs are marked below.

    python3 -m venv golden && golden/bin/pip install fusion-bench==0.2.33 transformers==4.51.3 "datasets<4"
    golden/bin/python tests/golden/make_fusion_bench.py tests/golden/fusion_bench.safetensors
"""

import importlib.metadata
import json
import sys
import types
from copy import deepcopy

import torch
from bidict import bidict
from fusion_bench.method import BaseAlgorithm
from fusion_bench.method.fisher_merging.fisher_merging import fisher_merging
from fusion_bench.method.regmean.regmean import regmean_merging
from fusion_bench.method.regmean_plusplus.clip_regmean_plusplus import RegMeanAlgorithmForCLIPPlusPlus
from fusion_bench.method.regmean_plusplus.regmean_plusplus import RegMeanAlgorithmPlusPlus
from fusion_bench.method.simple_average import simple_average
from fusion_bench.method.task_arithmetic.task_arithmetic import TaskArithmeticAlgorithm
from fusion_bench.method.ties_merging.ties_merging import TiesMergingAlgorithm
from fusion_bench.modelpool import BaseModelPool
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPVisionConfig, CLIPVisionModel

CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
CLASSES, EXPERTS, BATCH = 3, ("a", "b", "c"), 8


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_model = CLIPVisionModel(CLIPVisionConfig(**CONFIG, attn_implementation="eager")).vision_model
        self.fc = nn.Linear(CONFIG["hidden_size"], CLASSES)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def forward(self, images: torch.Tensor) -> types.SimpleNamespace:
        return types.SimpleNamespace(logits=self.fc(self.vision_model(images).pooler_output))


class Trainer:
    """What FusionBench's port of MergeLM asks of a trainer."""

    _train_batch_size = BATCH

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def get_train_dataloader(self) -> list:
        return [{"images": batch} for batch in self.images.split(BATCH)]

    def _prepare_inputs(self, inputs: dict) -> dict:
        return inputs


class PlusPlus(RegMeanAlgorithmForCLIPPlusPlus):
    """Only where the images come from is replaced: no processor, no zero-shot head."""

    # FusionBench's own is a plain dict, which its constructor cannot read.
    _config_mapping = bidict({**RegMeanAlgorithmPlusPlus._config_mapping, "_dataloader_kwargs": "dataloader_kwargs"})

    def on_regmean_start(self) -> None:
        pass

    def get_input_for_first_layer(self, model: nn.Module, train_dataset: torch.Tensor) -> list:
        vision = model.vision_model
        return [vision.pre_layrnorm(vision.embeddings(batch)).detach() for batch in train_dataset.split(BATCH)]


def towers() -> tuple[nn.Module, dict[str, nn.Module]]:
    torch.manual_seed(0)
    base, experts = Tower().eval(), {}
    for name in EXPERTS:
        experts[name] = deepcopy(base)
        with torch.no_grad():
            for parameter in experts[name].parameters():
                parameter.add_(0.2 * torch.randn_like(parameter) * (parameter.std() if parameter.numel() > 1 else 1))
                parameter.add_(0.02 * torch.randn_like(parameter))
    return base, experts


def main(path: str) -> None:
    base, experts = towers()
    images = {name: torch.randn(2 * BATCH, 3, 16, 16) * (k + 1) for k, name in enumerate(EXPERTS)}
    models, trainers = list(experts.values()), [Trainer(images[name]) for name in EXPERTS]
    examples = [len(images[name]) for name in EXPERTS]
    fresh = lambda: [deepcopy(model) for model in models]  # noqa: E731

    def pool() -> BaseModelPool:
        models = BaseModelPool({"_pretrained_": deepcopy(base), **deepcopy(experts)})
        models.load_train_dataset = images.__getitem__
        return models

    def run(algorithm: BaseAlgorithm) -> dict:
        return algorithm.run(pool()).state_dict()

    def ties(merge: str) -> dict:
        return run(TiesMergingAlgorithm(scaling_factor=0.3, threshold=20, remove_keys=[], merge_func=merge))

    plus_plus = PlusPlus(
        dataloader_kwargs={},
        num_regmean_examples=2 * BATCH,
        exclude_param_names_regex=[],
        reduce_non_diagonal_ratio=0.9,
        weight_transpose=True,
    )
    states = {
        "simple_average": simple_average(fresh()).state_dict(),
        "task_arithmetic": run(TaskArithmeticAlgorithm(scaling_factor=0.3)),
        "ties_mean": ties("mean"),
        "ties_sum": ties("sum"),
        "ties_max": ties("max"),
        "fisher": fisher_merging(fresh(), trainers, [], examples),
        "regmean": regmean_merging(fresh(), trainers, [], examples, reduce_non_diagonal_ratio=0.9),
        "regmean_plusplus": run(plus_plus),
    }
    tensors = {f"base/{key}": value for key, value in base.state_dict().items()}
    for name in EXPERTS:
        tensors |= {f"expert/{name}/{key}": value for key, value in experts[name].state_dict().items()}
        tensors[f"images/{name}"] = images[name]
    for method, state in states.items():
        tensors |= {f"result/{method}/{key}": value for key, value in state.items()}
    versions = {name: importlib.metadata.version(name) for name in ("fusion-bench", "transformers", "torch")}
    about = {"versions": json.dumps(versions), "config": json.dumps(CONFIG), "batch": str(BATCH)}
    plain = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
    save_file(plain, path, metadata=about)


if __name__ == "__main__":
    main(sys.argv[1])
