"""Names and modules of four libraries: where the head is, what pixels they expect, how they are rebuilt."""

import sys
from pathlib import Path

import monai.networks.nets as monai_nets
import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

import mergestream as ms
from conftest import HandWritten, make_images
from mergestream.networks.architecture import (
    Architecture,
    create_network,
    find_head,
    from_architecture,
    from_module,
    logits_of,
)
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import ExpertCard


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("vit_tiny_patch16_224", ("head",)),
        ("resnet18", ("fc",)),
        ("convnext_atto", ("head.fc",)),
        ("efficientnet_lite0", ("classifier",)),
        ("deit_tiny_distilled_patch16_224", ("head", "head_dist")),
        ("swin_tiny_patch4_window7_224", ("head.fc",)),
    ],
)
def test_timm_heads(name: str, head: tuple[str, ...]) -> None:
    assert find_head(timm.create_model(name, num_classes=3)) == head


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc"),
        ("vit_b_32", "heads.head"),
        ("vgg11", "classifier.6"),
        ("convnext_tiny", "classifier.2"),
        ("mobilenet_v3_small", "classifier.3"),
        ("squeezenet1_0", "classifier.1"),
        ("swin_t", "head"),
        ("densenet121", "classifier"),
    ],
)
def test_torchvision_heads(name: str, head: str) -> None:
    with torch.device("meta"):  # the structure alone
        module = torchvision.models.get_model(name, weights=None, num_classes=3)
    assert find_head(module) == (head,)


MONAI = {
    "class_layers.out": lambda: monai_nets.DenseNet(
        spatial_dims=2, in_channels=3, out_channels=3, init_features=8, growth_rate=4, block_config=(2, 2)
    ),
    "fc": lambda: monai_nets.resnet10(spatial_dims=2, n_input_channels=3, num_classes=3),
    "_fc": lambda: monai_nets.EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2, num_classes=3),
    "last_linear": lambda: monai_nets.SEResNet50(spatial_dims=2, in_channels=3, num_classes=3),
    "classification_head.0": lambda: monai_nets.ViT(
        in_channels=3,
        img_size=32,
        patch_size=8,
        spatial_dims=2,
        classification=True,
        num_classes=3,
        hidden_size=24,
        mlp_dim=24,
        num_layers=1,
        num_heads=2,
    ),
}


@pytest.mark.parametrize("head", list(MONAI))
def test_monai_networks_are_split_and_run(head: str) -> None:
    torch.manual_seed(0)
    pool = ms.ExpertPool.from_modules({"a": MONAI[head](), "b": MONAI[head]()})
    assert pool.template.head == (head,)
    assert pool.preprocessing is None
    images = make_images(2, 32).float() / 255
    assert ms.create_method("entropy_adaptive", pool)(images).shape == (2, 3)


MONAI_BY_NAME = {
    "DenseNet": {"in_channels": 3, "init_features": 8, "growth_rate": 4, "block_config": (2, 2), "act": ("ELU", {})},
    "resnet10": {"n_input_channels": 3},
    "EfficientNetBN": {"model_name": "efficientnet-b0"},
    "SENet": {"in_channels": 3, "block": "se_resnet_bottleneck", "layers": [1] * 4, "groups": 1, "reduction": 8},
    "ViT": {
        "in_channels": 3, "img_size": 32, "patch_size": 8, "classification": True, "hidden_size": 24, "mlp_dim": 24,
        "num_layers": 1, "num_heads": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "SENet" else name for name in MONAI_BY_NAME]
)
def test_monai_networks_are_built_again_from_their_cards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("torch.hub.download_url_to_file", None)
    networks = {
        site: create_network(f"monai:{name}", num_classes=3, spatial_dims=2, **MONAI_BY_NAME[name]) for site in "ab"
    }
    for site, network in networks.items():
        card = ExpertCard.for_network(site, network, ("x", "y", "z"))
        write_expert(tmp_path / "pool" / site, network.module.state_dict(), card)
    pool = ms.ExpertPool.load(tmp_path / "pool")
    assert pool.template.architecture.library == "monai"
    assert pool.preprocessing is None
    pool.save(tmp_path / "again")
    assert ms.ExpertPool.load(tmp_path / "again").fingerprint() == pool.fingerprint()
    images = make_images(2, 32).float() / 255
    with torch.no_grad():
        expected = torch.stack([logits_of(network.module(images)) for network in networks.values()])
    torch.testing.assert_close(pool.logits(images), expected)


def test_monai_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("monai", "monai.networks"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ms.MergestreamError, match=r"pip install 'mergestream\[monai\]'"):
        create_network("monai:DenseNet121", num_classes=2)


@pytest.mark.parametrize(
    "name",
    [
        "Transchex",  # downloads BERT when it is made
        "TorchVisionFCModel",  # calls what its arguments name
        "get_pretrained_resnet_medicalnet",
        "drop_connect",
        "BlockArgs",
        "densenet",
        "resnet._resnet",
        "__loader__",
        "__builtins__",
        "",
    ],
)
def test_a_card_reaches_nothing_in_monai_but_classifiers(name: str) -> None:
    with pytest.raises(ms.MergestreamError, match="There is no MONAI classifier"):
        Architecture("monai", name, {"resnet_depth": 18}).build()


@pytest.mark.parametrize(
    ("library", "name", "arguments"),
    [
        ("timm", "vit_tiny_patch16_224", {"img_size": 32, "depth": 1}),
        ("timm", "swin_tiny_patch4_window7_224", {"img_size": 56, "window_size": 7, "depths": [1, 1, 1, 1]}),
        ("timm", "eva02_tiny_patch14_224", {"img_size": 28, "depth": 1}),
        ("torchvision", "resnet18", {}),
        (
            "transformers",
            "ResNetForImageClassification",
            {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        ),
    ],
)
def test_weights_that_a_file_replaces_are_not_drawn(library: str, name: str, arguments: dict) -> None:
    """But buffers, which may be in no file, are those of an ordinary network."""
    architecture = Architecture(library, name, arguments)
    drawn = architecture.build()
    before = torch.random.get_rng_state()
    unwritten = architecture.build(most=sum(p.numel() for p in drawn.parameters()))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [(k, v.shape) for k, v in unwritten.state_dict().items()] == [
        (k, v.shape) for k, v in drawn.state_dict().items()
    ]
    assert all(p.requires_grad for p in unwritten.parameters())
    buffers = dict(unwritten.named_buffers())
    assert buffers.keys() == dict(drawn.named_buffers()).keys()
    assert all(torch.equal(buffers[key], value) for key, value in drawn.named_buffers())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("ViT", {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}),
        ("ResNet", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    ],
)
def test_hugging_face_networks_are_split_and_rebuilt(kind: str, settings: dict) -> None:
    config = getattr(transformers, f"{kind}Config")(**settings, num_labels=3)
    module = getattr(transformers, f"{kind}ForImageClassification")(config)
    network = from_module(module)
    assert network.head == ("classifier",)
    again = from_architecture(network.architecture)
    assert [(k, v.shape) for k, v in again.module.state_dict().items()] == [
        (k, v.shape) for k, v in module.state_dict().items()
    ]
    assert again.preprocessing == network.preprocessing
    assert len(network.preprocessing.mean) == 3


def test_hugging_face_preprocessing_is_the_processors_at_the_networks_size() -> None:
    network = create_network("transformers:ViTForImageClassification", num_classes=2, image_size=64)
    assert network.preprocessing == Preprocessing((64, 64), "bilinear", (0.5,) * 3, (0.5,) * 3)


def test_preprocessing_is_known_per_network() -> None:
    vit = create_network("vit_tiny_patch16_224", num_classes=2, img_size=64)
    assert vit.preprocessing == Preprocessing((64, 64), "bicubic", (0.5,) * 3, (0.5,) * 3)
    grey = create_network("resnet18", num_classes=2, in_chans=1)
    assert len(grey.preprocessing.mean) == 1
    tv = create_network("torchvision:efficientnet_b3", num_classes=2)
    assert tv.preprocessing.size == (300, 300)
    assert tv.preprocessing.interpolation == "bicubic"


def test_preprocessing_resizes_without_a_crop_and_normalises() -> None:
    preprocessing = Preprocessing((8, 8), "bilinear", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    ramp = torch.linspace(0, 255, 32).round().to(torch.uint8).expand(1, 3, 16, 32)
    out = preprocessing(ramp)
    assert out.shape == (1, 3, 8, 8)
    assert out.dtype == torch.float32
    assert float(out[0, 0, 0, 0]) < -1.7  # both ends of the ramp are still there: nothing was cropped
    assert float(out[0, 0, 0, -1]) > 1.7
    same = make_images(2, 8)
    torch.testing.assert_close(preprocessing(same), (same / 255 - 0.5) / 0.25)


def test_a_given_head_wins_and_a_wrong_one_is_refused() -> None:
    module = HandWritten()
    assert find_head(module) == ("fc",)
    assert find_head(module, "mix") == ("mix",)
    with pytest.raises(ms.MergestreamError, match="Did you mean 'fc'"):
        find_head(module, "fcc")
    with pytest.raises(ms.MergestreamError, match="no parameters"):
        find_head(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), "0")


def test_an_unknown_module_asks_for_its_head() -> None:
    with pytest.raises(ms.MergestreamError, match=r"head=.*linear layers: 1, 3"):
        find_head(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch16_244", "Did you mean 'vit_tiny_patch16_224'"),
        ("torchvision:resnet81", "Did you mean 'resnet18'"),
        ("transformers:VitForImageClassification", "Did you mean 'ViTForImageClassification'"),
        ("monai:DenseNet112", "Did you mean 'DenseNet121'"),
        ("keras:xception", "cannot be built from its name"),
    ],
)
def test_unknown_networks_are_refused(name: str, message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        create_network(name, num_classes=2)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ms.MergestreamError, match="Cannot build timm:resnet18"):
        create_network("resnet18", num_classes=2, wings=2)
    for arguments in ({}, {"spatial_dims": 7, "in_channels": 3}, {"spatial_dims": 2, "in_channels": 3, "wings": 2}):
        with pytest.raises(ms.MergestreamError, match=r"Cannot build monai:DenseNet121.*--arg"):
            create_network("monai:DenseNet121", num_classes=2, **arguments)
    with pytest.raises(ms.MergestreamError, match="cannot be built from its name"):
        Architecture("custom", "my.Network").build()
    with pytest.raises(ms.MergestreamError, match="Did you mean 'bicubic'"):
        Preprocessing((8, 8), "bicubik")
    with pytest.raises(ms.MergestreamError, match="std above 0"):
        Preprocessing((8, 8), std=(1.0, 0.0, 1.0))


def test_outputs_that_are_no_logits_are_refused() -> None:
    assert logits_of((torch.zeros(1, 2), None)).shape == (1, 2)
    with pytest.raises(ms.MergestreamError, match="expected logits"):
        logits_of({"scores": 1})


def test_a_misspelt_network_does_not_list_a_thousand() -> None:
    with pytest.raises(ms.MergestreamError, match=r"no timm network called 'vit_bse_patch16_224'") as caught:
        create_network("vit_bse_patch16_224", num_classes=2)
    assert "Did you mean 'vit_base_patch16_224'?" in str(caught.value)
    assert len(str(caught.value)) < 500
    with pytest.raises(ms.MergestreamError, match=r"and \d+ more"):
        create_network("???", num_classes=2)
