"""A captured training step may not wait for the host: watched here without a GPU, on tensors that only claim one."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.transforms.v2.functional._color import _hsv_to_rgb, _rgb_to_hsv

from benching import NETWORK
from mergestream.networks import preprocessing
from mergestream.networks.architecture import Network, create_network
from mergestream.training import Recipe, augmentation, stepper
from mergestream.training.heads import add_dropout
from mergestream.training.stepper import COMPILED, EAGER, GRAPH, Stepper, choose_execution


class HostTraffic(TorchDispatchMode):
    """Every operation that touches a tensor of the host with any shape at all."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type == "cpu" for tensor in tensors) or "item" in str(function):
            self.seen.append(str(function))
        return result


@pytest.fixture
def claimed_gpu() -> Iterator[Network]:
    """A network whose weights claim to lie on a GPU."""
    preprocessing._columns.cache_clear()
    network = create_network("vit_tiny_patch16_224", num_classes=3, **NETWORK)
    with FakeTensorMode():
        for module in network.module.modules():
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(torch.empty(weight.shape, device="cuda")))
        yield network
    preprocessing._columns.cache_clear()  # it holds tensors that are none


@pytest.mark.parametrize("loss", ["plain", "weighted"])
def test_a_step_touches_nothing_of_the_host(loss: str, claimed_gpu: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's own part is made for graphs, but its backward asks for a true device, and its optimiser looks at the
    # learning rate when it is built.
    monkeypatch.setattr(torch.Tensor, "backward", lambda _: None)
    monkeypatch.setattr(stepper, "create_optimiser", lambda *_: mock.Mock(param_groups=[]))
    recipe = Recipe(dropout=0.1, loss=loss, views=("hflip", "vflip"), label_smoothing=0.1)
    images = torch.empty(20, 3, 16, 16, dtype=torch.uint8, device="cuda")
    labels = torch.empty(20, dtype=torch.long, device="cuda")
    batches = torch.empty(4, 8, dtype=torch.long, device="cuda")
    weights = torch.empty(3, device="cuda") if loss == "weighted" else None
    learn = Stepper(claimed_gpu, images, labels, batches, recipe, weights)._create_step(compiled=False)
    learn(batches[0])  # what is made once is made here, as in the warm-up
    with HostTraffic() as traffic:
        learn(batches[1])
    assert traffic.seen == []


@pytest.mark.usefixtures("claimed_gpu")
def test_host_traffic_would_be_seen() -> None:
    with HostTraffic() as traffic:
        torch.empty(3, device="cuda") + torch.tensor([1.0, 2.0, 3.0]).to("cuda")
    assert any("_to_copy" in name for name in traffic.seen)


def test_hue_and_back_is_torchvisions() -> None:
    pixels = torch.rand(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    pixels[0] = 0.5  # grey has no hue
    pixels[1, 1] = pixels[1, 0]
    hsv = augmentation._rgb_to_hsv(pixels)
    assert torch.equal(hsv, _rgb_to_hsv(pixels))
    rgb = augmentation._hsv_to_rgb(*hsv.split(1, dim=1))
    torch.testing.assert_close(rgb, _hsv_to_rgb(hsv), rtol=0, atol=1e-5)
    torch.testing.assert_close(rgb, pixels, rtol=0, atol=1e-5)


def test_how_steps_are_taken() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_execution(Recipe(), cpu) == EAGER
    assert choose_execution(Recipe(steps=5001), gpu) == COMPILED
    assert choose_execution(Recipe(steps=100), gpu) == GRAPH
    assert choose_execution(Recipe(steps=100, compile="always"), gpu) == COMPILED
    for eager in ({"compile": "never"}, {"schedule": "one_cycle"}, {"precision": "16-mixed"}):
        assert choose_execution(Recipe(**eager), gpu) == EAGER


def test_the_next_fit_of_a_network_uses_what_was_compiled_for_the_first() -> None:
    """On the CPU, where compilation works as well: counted by how often the compiler is asked."""
    from torch._dynamo.testing import CompileCounter

    compiler = CompileCounter()
    recipe = Recipe(dropout=0.1)
    stepper._networks.clear()
    answers = []
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=compiler)):
        for seed in range(3):
            torch.manual_seed(seed)
            fresh = create_network("vit_tiny_patch16_224", num_classes=3, **NETWORK)
            network = stepper.shared_network(fresh, recipe)
            add_dropout(network, recipe.dropout)
            images = torch.ones(2, 3, 16, 16)
            torch.testing.assert_close(network.module.eval()(images), fresh.module.eval()(images), rtol=1e-5, atol=1e-6)
            answers.append(stepper.compiled_forward(network.module.train())(images))
    assert len(stepper._networks) == 1
    assert compiler.frame_count == 1
    assert not torch.equal(answers[0], answers[1])
    other = stepper.shared_network(create_network("vit_tiny_patch16_224", num_classes=4, **NETWORK), recipe)
    assert other.module is not network.module
    stepper._networks.clear()
