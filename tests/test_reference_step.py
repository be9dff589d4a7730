"""The step against an independent implementation written from the equations, for five kinds of network."""

import math
import sys
from types import FrameType

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import mergestream as ms
from conftest import HandWritten, make_experts, make_images, make_pool

CLASSES = 5


def hugging_face_vit() -> nn.Module:
    config = ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    config.num_labels = CLASSES
    return ViTForImageClassification(config)


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=96, num_classes=CLASSES
    )


def vit_tiny() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, img_size=64, depth=4)


NETWORKS = {
    "timm ViT-Ti/16": (vit_tiny, "head.", 64, 0.1),
    "timm ResNet-18": (lambda: timm.create_model("resnet18", num_classes=CLASSES), "fc.", 32, 0.1),
    "torchvision ViT": (torchvision_vit, "heads.head.", 32, 0.1),
    "Hugging Face ViT": (hugging_face_vit, "classifier.", 32, 0.1),
    "hand-written": (lambda: HandWritten(CLASSES), "fc.", 32, 0.7),
}


def raw_logits(module: nn.Module, images: Tensor) -> Tensor:
    output = module(images)
    return getattr(output, "logits", output)


class Naive:
    """Algorithm 1 with state dicts, Python floats and no shared code. Every K is a loop."""

    def __init__(self, experts: dict[str, nn.Module], head: str, tau_h: float, mu: float, eps: float = 1e-6) -> None:
        self.experts, self.head, self.tau_h, self.mu, self.eps = list(experts.values()), head, tau_h, mu, eps
        k = len(self.experts)
        self.a, self.h = [1 / k] * k, [1 / k] * k
        self.names = list(experts)

    @torch.no_grad()
    def step(self, images: Tensor) -> tuple[Tensor, list[float], list[float], list[float], list[float], str]:
        energies, consistencies = [], []
        for module in self.experts:
            total, agreement = 0.0, 0.0
            plain = raw_logits(module, images).double().softmax(-1).tolist()
            flipped = raw_logits(module, images.flip(3)).double().softmax(-1).tolist()
            for p, q in zip(plain, flipped, strict=True):
                total += -sum(c * math.log(c) for c in p if c > 0)
                agreement += 1 - sum(abs(x - y) for x, y in zip(p, q, strict=True)) / 2
            energies.append(total / len(images))
            consistencies.append(agreement / len(images))
        inverse = [1 / (e + self.eps) for e in energies]
        a = [i / sum(inverse) for i in inverse]
        ranking = [i * (1 + c) for i, c in zip(inverse, consistencies, strict=True)]
        star = ranking.index(max(ranking))
        gap = [math.exp(-self.tau_h * abs(e - energies[star])) for e in energies]
        h = [g / sum(gap) for g in gap]
        self.a = [self.mu * old + (1 - self.mu) * new for old, new in zip(self.a, a, strict=True)]
        self.h = [self.mu * old + (1 - self.mu) * new for old, new in zip(self.h, h, strict=True)]
        return self.predict(images), self.a, self.h, energies, consistencies, self.names[star]

    def predict(self, images: Tensor) -> Tensor:
        states = [module.state_dict() for module in self.experts]
        parameters = {name for name, _ in self.experts[0].named_parameters(remove_duplicate=False)}
        merged = {}
        for key, tensor in states[0].items():
            if not tensor.is_floating_point():
                merged[key] = torch.stack([state[key] for state in states]).max(dim=0).values
                continue
            weights = self.h if key.startswith(self.head) and key in parameters else self.a
            merged[key] = sum(w * state[key].double() for w, state in zip(weights, states, strict=True)).float()
        first = self.experts[0]
        own = {key: tensor.clone() for key, tensor in first.state_dict().items()}
        first.load_state_dict(merged)
        logits = raw_logits(first, images)
        first.load_state_dict(own)
        return logits


@pytest.mark.parametrize("kind", list(NETWORKS))
@pytest.mark.parametrize(("tau_h", "mu"), [(1.0, 0.0), (5.0, 0.6)])
def test_the_step_equals_the_equations(kind: str, tau_h: float, mu: float) -> None:
    factory, head, size, noise = NETWORKS[kind]
    experts = make_experts(factory, head_noise=noise)  # saturated experts would only compare rounding errors
    pool = ms.ExpertPool.from_modules(experts)
    method = ms.create_method("entropy_adaptive", pool, head_sharpness=tau_h, momentum=mu)
    naive = Naive(experts, head, tau_h, mu)
    for seed, count in enumerate((4, 3, 1)):
        images = make_images(count, size, seed).float() / 255 - 0.5
        step = method.step(images)
        logits, a, h, energies, consistencies, star = naive.step(images)
        torch.testing.assert_close(step.entropy, torch.tensor(energies), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(step.consistency, torch.tensor(consistencies), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step.encoder_coefficients, torch.tensor(a), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(step.head_coefficients, torch.tensor(h), rtol=1e-4, atol=1e-6)
        assert step.head_expert == star
        torch.testing.assert_close(step.logits, logits, rtol=1e-3, atol=1e-4)
        spread = float(step.encoder_coefficients.max() - step.encoder_coefficients.min())
        assert spread > 0.01, "the experts do not differ: this comparison would prove nothing"


def test_pinned_numbers() -> None:
    """Worked by hand: two experts, two classes, one image; p = (0.9, 0.1) and (0.6, 0.4)."""
    from mergestream.functional import coefficients
    from mergestream.functional import scores as scoring

    p = torch.tensor([[[0.9, 0.1]], [[0.6, 0.4]]])
    energy = scoring.entropy(p.log())
    torch.testing.assert_close(energy, torch.tensor([0.3250830, 0.6730117]))
    torch.testing.assert_close(coefficients.inverse(energy, 1e-6), torch.tensor([0.6742912, 0.3257088]))
    star = coefficients.head_expert(energy, torch.tensor([0.5, 1.0]), 1e-6)
    assert int(star) == 0  # 1.5 / 0.3251 = 4.61 against 2 / 0.6730 = 2.97
    torch.testing.assert_close(coefficients.entropy_gap(energy, star, 1.0), torch.tensor([0.5861157, 0.4138843]))
    flipped = torch.tensor([[[[0.7, 0.3]], [[0.6, 0.4]]]])
    torch.testing.assert_close(scoring.consistency(p, flipped), torch.tensor([0.8, 1.0]))


def test_bf16_weights_are_scored_and_merged_in_fp32() -> None:
    experts = make_experts(lambda: timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, img_size=32))
    pool = ms.ExpertPool.from_modules(experts).to(dtype=torch.bfloat16)
    step = ms.create_method("entropy_adaptive", pool).step(make_images(4, 32))
    for tensor in (step.logits, step.entropy, step.encoder_coefficients, step.head_coefficients):
        assert tensor.dtype == torch.float32
    thirds = [0.2, 0.3, 0.5]
    exact = sum(c * row.double() for c, row in zip(thirds, pool.bank, strict=True))
    merged = pool.merge(torch.tensor(thirds))
    assert merged.dtype == torch.bfloat16
    one_rounding = exact.abs().max() * 2**-8
    assert (merged.double() - exact).abs().max() <= one_rounding


@pytest.mark.parametrize("size", [16, 40])
def test_a_step_passes_through_at_most_fifteen_functions(size: int) -> None:
    """Of ours, from raw pixels to the answer, resizing included: a newcomer can follow a step from end to end."""
    method = ms.create_method("entropy_adaptive", make_pool("vit"))
    method.step(make_images(4, size))
    images, functions = make_images(4, size, 1), set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and "/mergestream/" in code.co_filename:
            functions.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        method.step(images)
    finally:
        sys.setprofile(None)
    assert 5 < len(functions) <= 15, sorted(functions)
