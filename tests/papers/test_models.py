import pytest
import torch
from torch import nn

from benchmarks import models
from remat.runtime.calls.stages import flatten


@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    [
        ("resnet18", 18, 11_689_512),
        ("resnet34", 34, 21_797_672),
        ("resnet50", 50, 25_557_032),
        ("resnet101", 101, 44_549_160),
        ("resnet152", 152, 60_192_808),
        ("resnet200", 200, None),
        ("resnet1001", 1001, None),
    ],
)
def test_resnets_have_the_layers_their_names_say(name: str, layers: int, parameters: int | None) -> None:
    """Convolutions and the classifier, projections aside; parameters as in the well-known implementations."""
    with torch.device("meta"):
        model = getattr(models, name)()
    weights = [
        module_name
        for module_name, module in model.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear)) and "shortcut" not in module_name
    ]
    assert len(weights) == layers
    if parameters is not None:
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    side = 32 if name == "resnet1001" else 64
    classes = 10 if name == "resnet1001" else 1000
    assert model(torch.empty(2, 3, side, side, device="meta")).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "parameters", "stages"),
    [
        ("vgg11", 132_868_840, 8 + 5 + 2 + 3),
        ("vgg16", 138_365_992, 13 + 5 + 2 + 3),
        ("vgg19", 143_678_248, 16 + 5 + 2 + 3),
        ("densenet121", 7_978_856, 1 + 58 + 3 + 4),
        ("densenet161", 28_681_000, 1 + 78 + 3 + 4),
        ("densenet169", 14_149_480, 1 + 82 + 3 + 4),
        ("densenet201", 20_013_928, 1 + 98 + 3 + 4),
        ("inception_v3", 23_834_568, 22),
    ],
)
def test_chains_of_the_papers_networks(name: str, parameters: int, stages: int) -> None:
    """As many parameters as the well-known implementations (Inception without its auxiliary classifier)."""
    with torch.device("meta"):
        model = getattr(models, name)()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert len(model) == stages
    assert model(torch.empty(2, 3, 96, 96, device="meta")).shape == (2, 1000)


def test_densenet_as_a_chain_computes_what_the_class_does() -> None:
    chain = models.densenet121(num_classes=10, growth=4)
    network = models.DenseNet((6, 12, 24, 16), growth=4, classes=10)
    assert [tuple(p.shape) for p in chain.parameters()] == [tuple(p.shape) for p in network.parameters()]
    with torch.no_grad():
        for mine, theirs in zip(chain.parameters(), network.parameters(), strict=True):
            mine.copy_(theirs)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(chain(images), network(images))


def test_gpt() -> None:
    model = models.gpt(depth=3, width=24, heads=2, vocabulary=50, context=9, dropout=0.0)
    assert len(flatten(model)) == 1 + 3 + 2
    tokens = torch.randint(0, 50, (2, 9))
    logits = model(tokens)
    assert logits.shape == (2, 9, 50)
    changed = tokens.clone()
    changed[:, 5:] = 0
    assert torch.equal(model(changed)[:, :5], logits[:, :5])  # causal: later tokens do not matter
    assert not torch.equal(model(changed)[:, 5:], logits[:, 5:])
    with pytest.raises(ValueError, match="width=10 is not a multiple of heads=4"):
        models.gpt(width=10, heads=4)
