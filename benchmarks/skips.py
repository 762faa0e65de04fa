"""Models whose blocks are joined by more than one tensor, within shares of the memory that plain PyTorch takes.

    python -m benchmarks skips

Networks for diffusion and segmentation, and transformers of libraries that build a layer of several modules. The
libraries are no dependencies of remat: `pip install --target FOLDER --no-deps diffusers segmentation-models-pytorch
timm torchvision monai x-transformers einops einx loguru frozendict torch-einops-utils open_clip_torch ftfy wcwidth`
and `PYTHONPATH=FOLDER` are enough; a model whose library is missing has a row that says so.

Of each model: the peak and time of checkpointing every block by hand, the least limit of a plan, what `remat.fit` costs
over a plain step, and at each share the time over plain PyTorch's (CPU time of one thread, in turns), the measured peak
over the limit, and whether gradients are the same to the last bit.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import remat
from benchmarks.any_model import Made, _language
from benchmarks.keeping import Kept, Rows
from benchmarks.models.unet import UNet
from benchmarks.pairing import in_turn, peak_of, quartiles
from benchmarks.zoo import declare_operators
from remat.runtime.planned.patched_forward import patched_forward_of

SHARES = (0.7, 0.5, 0.35)
_ROUNDS = 7
_NOTE = "time over plain PyTorch: CPU time of one thread, quartiles of pairs; shares are of plain PyTorch's peak"


class Entry(NamedTuple):
    """How to make a model and its sample, and the classes of the blocks that people would checkpoint."""

    make: Callable[[], Made]
    blocks: tuple[str, ...]


def _images(size: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def _of_smp(kind: str) -> Made:
    import segmentation_models_pytorch as smp

    return getattr(smp, kind)("resnet18", encoder_weights=None), {"x": _images(192)}


def _unet_2d() -> Made:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=64, block_out_channels=(32, 64, 64), layers_per_block=2,
        down_block_types=("DownBlock2D",) * 3, up_block_types=("UpBlock2D",) * 3,
    )  # fmt: skip
    return model, {"sample": _images(64), "timestep": torch.tensor([3, 5])}


def _unet_conditional() -> Made:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64, 128), layers_per_block=1, cross_attention_dim=64,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"), norm_num_groups=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
    )  # fmt: skip
    words = torch.randn(2, 16, 64)
    sample = {"sample": torch.randn(2, 4, 32, 32), "timestep": torch.tensor([3, 5]), "encoder_hidden_states": words}
    return model, sample


def _dit() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=8, attention_head_dim=32, in_channels=4, num_layers=6, sample_size=16, num_embeds_ada_norm=9
    )
    places = torch.tensor([1, 2, 3, 4])
    return model, {"hidden_states": torch.randn(4, 4, 16, 16), "timestep": places, "class_labels": places}


def _unet_monai() -> Made:
    from monai.networks.nets import UNet as Monai

    sizes = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2), "num_res_units": 2}
    return Monai(spatial_dims=3, in_channels=1, out_channels=2, **sizes), {"x": torch.randn(1, 1, 64, 64, 64)}


def _swin() -> Made:
    from monai.networks.nets import SwinUNETR

    return SwinUNETR(in_channels=1, out_channels=2, feature_size=12), {"x_in": torch.randn(1, 1, 64, 64, 64)}


def _hrnet() -> Made:
    import timm

    return timm.create_model("hrnet_w18_small", features_only=True, pretrained=False), {"x": _images(224)}


def _x_transformers() -> Made:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=256, depth=6, heads=4)
    return TransformerWrapper(num_tokens=256, max_seq_len=256, attn_layers=layers), {"x": torch.randint(256, (4, 256))}


def _open_clip() -> Made:
    from open_clip.transformer import VisionTransformer

    sizes = {"width": 256, "layers": 6, "heads": 4, "mlp_ratio": 4, "output_dim": 64}
    return VisionTransformer(image_size=128, patch_size=8, **sizes), {"x": _images(128, 4)}


def _t5() -> Made:
    sizes = {"num_layers": 4, "d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 1024}
    return _language("T5", 4, 256, 500, decoder_start_token_id=0, use_cache=False, **sizes)


def _whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}
    config = WhisperConfig(
        vocab_size=500, d_model=256, num_mel_bins=16, max_source_positions=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, use_cache=False, **heads, **sizes,
    )  # fmt: skip
    labels = torch.randint(3, 500, (4, 256))
    return WhisperForConditionalGeneration(config), {"input_features": torch.randn(4, 16, 512), "labels": labels}


_OF_SMP = ("BasicBlock", "UnetDecoderBlock", "DecoderBlock", "SegmentationBlock", "FPNBlock", "ASPP")
ENTRIES: dict[str, Entry] = {
    "UNet of remat's benchmarks": Entry(lambda: (UNet(width=16, levels=3), {"images": _images(128)}), ("Sequential",)),
    "diffusers UNet2DModel": Entry(_unet_2d, ("ResnetBlock2D",)),
    "diffusers UNet2DConditionModel": Entry(_unet_conditional, ("ResnetBlock2D", "BasicTransformerBlock")),
    "smp Unet": Entry(partial(_of_smp, "Unet"), _OF_SMP),
    "MONAI UNet": Entry(_unet_monai, ("ResidualUnit",)),
    "smp FPN": Entry(partial(_of_smp, "FPN"), _OF_SMP),
    "smp UnetPlusPlus": Entry(partial(_of_smp, "UnetPlusPlus"), _OF_SMP),
    "smp DeepLabV3Plus": Entry(partial(_of_smp, "DeepLabV3Plus"), _OF_SMP),
    "timm hrnet_w18_small": Entry(_hrnet, ("BasicBlock", "Bottleneck")),
    "MONAI SwinUNETR": Entry(_swin, ("SwinTransformerBlock", "UnetrUpBlock", "UnetrBasicBlock")),
    "x-transformers Decoder": Entry(_x_transformers, ("Attention", "FeedForward")),
    "diffusers DiT": Entry(_dit, ("BasicTransformerBlock",)),
    "open_clip VisionTransformer": Entry(_open_clip, ("ResidualAttentionBlock",)),
    "T5": Entry(_t5, ("T5Block",)),
    "Whisper": Entry(_whisper, ("WhisperEncoderLayer", "WhisperDecoderLayer")),
}


@dataclass(frozen=True)
class _Step:
    """A training step, whose loss is the mean of all that the model returns; gradients are there before."""

    model: nn.Module
    sample: dict[str, Any]

    def __call__(self) -> None:
        torch.manual_seed(0)
        output = self.model(**self.sample)
        ends = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        own = getattr(output, "loss", None)
        (own if own is not None else sum(end.mean() for end in ends)).backward()

    def gradients(self) -> list[torch.Tensor]:
        """After one step."""
        self.model.zero_grad(set_to_none=False)
        self()
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.requires_grad]

    def peak_bytes(self) -> int:
        """Above what was there, with the sample."""
        return peak_of(self, self.sample, warm_up=1)


def skips() -> Rows:
    torch.set_num_threads(1)
    operators = declare_operators()
    kept = Kept("skips", _NOTE)
    rows = [row for name in ENTRIES for row in kept.part(name, partial(_of, name))]
    del operators  # not before: the declarations would go with it
    return rows


def _of(name: str) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    try:
        model, sample = ENTRIES[name].make()
    except ImportError as error:
        yield {"model": name, "missing": str(error)}
        return
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    plain = _Step(model.train(), sample)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    expected, most = plain.gradients(), plain.peak_bytes()
    seconds = _seconds(plain)
    row: dict[str, Any] = {"model": name, "plain_bytes": most, "plain_seconds": seconds}
    by_hand = _Step(copy.deepcopy(model), sample)
    for part in by_hand.model.modules():
        if type(part).__name__ in ENTRIES[name].blocks:
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    row["by hand over plain"] = round(by_hand.peak_bytes() / most, 3)
    row["by hand"] = quartiles(*reversed(in_turn([plain, by_hand], _ROUNDS)))
    fresh = copy.deepcopy(model)
    start = time.process_time()
    remat.fit(fresh, sample, most, quiet=True)
    row["fit, steps"] = round((time.process_time() - start) / seconds, 1)
    start = time.process_time()
    chain = remat.profile(fresh, sample, again=False)
    row["again, steps"] = round((time.process_time() - start) / seconds, 1)
    row["stages"] = chain.length - 1
    row["least over plain"] = round(remat.minimum_budget(chain, "fastest") / most, 3)
    row["predicted over measured"] = round(chain.store_all_bytes / most, 3)
    print(row, flush=True)
    yield row
    for share in SHARES:
        found = {"model": name, "share": share, **_within(fresh, plain, round(share * most), expected)}
        print(found, flush=True)
        yield found


def _seconds(step: _Step) -> float:
    return statistics.median(in_turn([step], 5)[0])


def _within(model: nn.Module, plain: _Step, limit: int, expected: list[torch.Tensor]) -> dict[str, Any]:
    try:
        remat.fit(model, plain.sample, limit, quiet=True)
    except remat.InfeasibleBudget as error:
        return {"refused": str(error), "least over limit": round(error.minimum / limit, 3)}
    step = _Step(model, plain.sample)
    first = step.gradients()
    patch = patched_forward_of(model)
    assert patch is not None
    ratio = quartiles(*reversed(in_turn([plain, step], _ROUNDS)))
    return {
        "over plain": ratio,
        "measured over limit": round(step.peak_bytes() / limit, 4),
        "same bits": all(torch.equal(a, b) for a, b in zip(first, expected, strict=True)),
        "how": (patch.summary or "").partition(": ")[2],
    }
