import pytest
import torch
from torch import nn

from remat import models
from remat.runtime.stages import flatten


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
