"""Models of timm and torchvision as they are: gradients bit for bit, two limits each, and predicted peaks.

    python -m benchmarks.zoo [--only NAME ...] [--out FILE]

Neither library is a dependency of remat: where they are missing, `pip install --target FOLDER --no-deps timm
torchvision` and `PYTHONPATH=FOLDER` are enough.

Each model, with random weights and in train mode, takes two steps as plain PyTorch and two under `remat.fit`, within
the least limit and within the middle between that and storing everything. What is compared and measured is in `Row`.
The file is written after each model, and a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import collections
import copy
import gc
import importlib.util
import json
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import remat
from benchmarks.keeping import RESULTS, origin, revision
from benchmarks.module_programs.holding import same
from benchmarks.pairing import peak_of
from remat.files import write_whole
from remat.simulation import store_all_peak

STEPS = 2
NOTE = "Models of timm and torchvision under remat.fit: outcomes within two limits, and predicted peaks of storing all"

# The models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A model of a library: what its sample looks like, and options of its constructor; `inputs`: how many samples."""

    size: int = 64
    batch: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    frames: int = 0
    inputs: int = 1

    def sample(self) -> tuple[torch.Tensor, ...]:
        frames = (self.frames,) if self.frames else ()
        return tuple(torch.randn(self.batch, 3, *frames, self.size, self.size) for _ in range(self.inputs))


_DROPS = {"drop_rate": 0.1, "drop_path_rate": 0.1}
_NO_BACKBONE = {"weights_backbone": None}
_AUX = {"aux_logits": True, "init_weights": False}

TORCHVISION: dict[str, Entry] = {
    "alexnet": Entry(),
    "vgg11_bn": Entry(),
    "resnet18": Entry(batch=4),
    "resnext50_32x4d": Entry(),
    "wide_resnet50_2": Entry(),
    "densenet121": Entry(),
    "googlenet": Entry(96, options=_AUX),
    "inception_v3": Entry(299, options=_AUX),
    "mobilenet_v2": Entry(),
    "mobilenet_v3_small": Entry(batch=4),
    "mobilenet_v3_large": Entry(),
    "efficientnet_b0": Entry(),
    "efficientnet_v2_s": Entry(),
    "regnet_x_400mf": Entry(),
    "regnet_y_400mf": Entry(),
    "convnext_tiny": Entry(),
    "shufflenet_v2_x0_5": Entry(batch=4),
    "squeezenet1_1": Entry(),
    "mnasnet0_5": Entry(batch=4),
    "vit_b_32": Entry(96, options={"image_size": 96}),
    "swin_t": Entry(),
    "swin_v2_t": Entry(),
    "maxvit_t": Entry(224, options={"input_size": (224, 224)}),
    "fcn_resnet50": Entry(options={"aux_loss": True, **_NO_BACKBONE}),
    "deeplabv3_resnet50": Entry(options={"aux_loss": True, **_NO_BACKBONE}),
    "deeplabv3_mobilenet_v3_large": Entry(96, options={"aux_loss": True, **_NO_BACKBONE}),
    "lraspp_mobilenet_v3_large": Entry(96, options=_NO_BACKBONE),
    "r3d_18": Entry(48, frames=8),
    "mc3_18": Entry(48, frames=8),
    "raft_small": Entry(128, inputs=2),
}

TIMM: dict[str, Entry] = {
    "beit_base_patch16_224": Entry(64, options={"img_size": 64, "depth": 6}),
    "botnet26t_256": Entry(256),
    "caformer_s18": Entry(),
    "cait_xxs24_224": Entry(96, options={"img_size": 96, **_DROPS}),
    "coat_lite_tiny": Entry(options={"img_size": 64}),
    "coatnet_nano_rw_224": Entry(96, options={"img_size": 96, **_DROPS}),
    "convit_tiny": Entry(96, options={"img_size": 96}),
    "convmixer_768_32": Entry(),
    "convnext_atto": Entry(batch=4, options=_DROPS),
    "convnextv2_atto": Entry(batch=4),
    "crossvit_tiny_240": Entry(240),
    "cspresnet50": Entry(),
    "davit_tiny": Entry(),
    "deit3_small_patch16_224": Entry(96, options={"img_size": 96}),
    "deit_tiny_distilled_patch16_224": Entry(96, options={"img_size": 96}),
    "densenet121": Entry(),
    "dla34": Entry(),
    "dpn48b": Entry(),
    "eca_nfnet_l0": Entry(),
    "edgenext_xx_small": Entry(),
    "efficientformer_l1": Entry(224),
    "efficientformerv2_s0": Entry(224),
    "efficientnet_lite0": Entry(options=_DROPS),
    "efficientvit_b0": Entry(),
    "efficientvit_m0": Entry(224),
    "ese_vovnet19b_dw": Entry(),
    "eva02_tiny_patch14_224": Entry(112, options={"img_size": 112}),
    "fasternet_t0": Entry(),
    "fastvit_t8": Entry(),
    "focalnet_tiny_srf": Entry(),
    "gcvit_xxtiny": Entry(224),
    "ghostnet_050": Entry(batch=4),
    "ghostnetv2_100": Entry(),
    "gmlp_ti16_224": Entry(224),
    "halonet26t": Entry(256),
    "hardcorenas_a": Entry(),
    "hgnetv2_b0": Entry(),
    "hiera_tiny_224": Entry(224),
    "hrnet_w18_small": Entry(),
    "inception_next_atto": Entry(),
    "inception_resnet_v2": Entry(96),
    "inception_v4": Entry(96),
    "lcnet_050": Entry(batch=4),
    "legacy_xception": Entry(96),
    "levit_128s": Entry(224),
    "levit_conv_128s": Entry(224),
    "mambaout_femto": Entry(),
    "maxvit_rmlp_pico_rw_256": Entry(128, options={"img_size": 128}),
    "mixer_s32_224": Entry(224),
    "mixnet_s": Entry(),
    "mnasnet_small": Entry(batch=4),
    "mobilenetv3_small_050": Entry(batch=4),
    "mobilenetv4_conv_small": Entry(),
    "mobileone_s0": Entry(),
    "mobilevit_xxs": Entry(96),
    "mobilevitv2_050": Entry(96),
    "mvitv2_tiny": Entry(96, options={"img_size": 96}),
    "nest_tiny": Entry(224),
    "nf_regnet_b0": Entry(),
    "nfnet_f0": Entry(),
    "pit_ti_distilled_224": Entry(224),
    "poolformer_s12": Entry(96),
    "pvt_v2_b0": Entry(),
    "rdnet_tiny": Entry(),
    "regnetx_002": Entry(batch=4),
    "regnety_002": Entry(batch=4),
    "repghostnet_050": Entry(),
    "repvgg_a0": Entry(),
    "repvit_m0_9": Entry(),
    "res2net50_26w_4s": Entry(),
    "resmlp_12_224": Entry(224),
    "resnest14d": Entry(),
    "resnet18": Entry(batch=4, options={"drop_path_rate": 0.1}),
    "resnetv2_50": Entry(),
    "rexnet_100": Entry(),
    "selecsls42b": Entry(),
    "sequencer2d_s": Entry(224, options={"layers": (1, 1, 2, 1)}),
    "seresnext26d_32x4d": Entry(),
    "shvit_s1": Entry(),
    "skresnet18": Entry(),
    "starnet_s1": Entry(),
    "swiftformer_xs": Entry(),
    "swin_tiny_patch4_window7_224": Entry(112, options={"img_size": 112, "window_size": 7}),
    "swinv2_cr_tiny_ns_224": Entry(112, options={"img_size": 112}),
    "tf_efficientnetv2_b0": Entry(),
    "tiny_vit_5m_224": Entry(96),
    "tnt_s_patch16_224": Entry(224, options={"depth": 4}),
    "twins_pcpvt_small": Entry(),
    "visformer_tiny": Entry(224),
    "vit_relpos_small_patch16_224": Entry(96, options={"img_size": 96}),
    "vit_tiny_patch16_224": Entry(96, batch=4, options={"img_size": 96, **_DROPS}),
    "volo_d1_224": Entry(96, options={"img_size": 96}),
    "xcit_nano_12_p16_224": Entry(96, batch=4, options={"drop_path_rate": 0.1}),
}

ENTRIES = {
    **{f"torchvision/{name}": entry for name, entry in TORCHVISION.items()},
    **{f"timm/{name}": entry for name, entry in TIMM.items()},
}


def declare_operators() -> torch.library.Library | None:
    """Declares the operators without which torchvision cannot be imported, where its compiled ones do not load.

    That is so where the wheel is for another build of PyTorch, with CUDA say. The models here call none of them. What
    is returned must live as long as torchvision is used; None where the compiled operators are there.
    """
    spec = importlib.util.find_spec("torchvision")
    folders = spec.submodule_search_locations if spec is not None else None
    for file in Path(next(iter(folders))).glob("_C*.so") if folders else ():
        try:
            torch.ops.load_library(file)
        except OSError as error:
            print(f"torchvision's {file.name} does not load ({error}); its operators are declared only", flush=True)
    if not folders or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def make(name: str) -> nn.Module:
    """The model of that name with random weights, in train mode, its auxiliary heads on."""
    library, _, kind = name.partition("/")
    options = ENTRIES[name].options
    torch.manual_seed(0)
    if library == "timm":
        import timm

        model = timm.create_model(kind, pretrained=False, **options)
    else:
        import torchvision

        model = torchvision.models.get_model(kind, weights=None, **options)
    switch = getattr(model, "set_distilled_training", None)
    if switch is not None:
        switch(True)
    return model.train()


# What a step leaves --------------------------------------------------------------------------------------------------

Sample = tuple[torch.Tensor, ...]
Left = dict[str, torch.Tensor | None]


def _ends(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _loss(output: Any) -> torch.Tensor:
    """Means of all outputs, which need next to no memory of their own."""
    return torch.stack([end.mean() for end in _ends(output)]).sum()


def _train(model: nn.Module, sample: Sample) -> Left:
    """Copies of outputs, gradients and buffers of each of two steps, by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    left: Left = {}
    for step in range(1, STEPS + 1):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=False)
        output = model(*sample)
        loss = _loss(output)
        left |= {f"step {step}: output {number}": end.detach().clone() for number, end in enumerate(_ends(output))}
        del output
        loss.backward()
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            left[f"step {step}: gradient of {name}"] = None if gradient is None else gradient.clone()
        left |= {f"step {step}: buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.step()
    return left


def _differing(one: Left, other: Left) -> list[str]:
    """Names of what is not the same to the last bit."""
    return [name for name in {**one, **other} if not same(one.get(name), other.get(name))]


def _peak(model: nn.Module, sample: Sample, *, output_held: bool = False) -> int:
    """The most memory of a step (forward, loss, backward) above what was there before it, and the sample's bytes."""
    model.zero_grad(set_to_none=False)
    gc.collect()
    torch.manual_seed(0)
    held: list[Any] = []

    def step() -> None:
        if output_held:
            held.append(model(*sample))
            _loss(held[0]).backward()
        else:
            _loss(model(*sample)).backward()

    return peak_of(step, sample)


# Rows ----------------------------------------------------------------------------------------------------------------


@dataclass
class Within:
    """What came of one limit.

    Attributes:
        limit: which it is, "least" or "middle".
        outcome: "pass"; "over", a measured peak is above the limit; "bits", something differs from plain PyTorch;
            "refused", an error that remat raises on purpose; "error", any other.
        measured_bytes: peak of a step after the two compared ones, the output not held during the backward.
        measured_held_bytes: the same with the output held.
        text: of the error, or what differs.
        where: the innermost frames of an error.
        warned: warnings that were given.
    """

    limit: str
    limit_bytes: int = 0
    outcome: str = "pass"
    measured_bytes: int | None = None
    measured_held_bytes: int | None = None
    measured_over_limit: float | None = None
    text: str = ""
    where: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


@dataclass
class Row:
    """A model: its sample, what was predicted and measured of storing everything, and what came of the limits.

    Attributes:
        plain_bytes: measured peak of a step of plain PyTorch, the output not held during the backward.
        plain_held_bytes: the same with the output held.
        predicted_bytes: the predicted peak of storing everything, the output held, as `remat.profile` takes it to be.
        revision: of the library.
    """

    model: str
    sample: list[list[int]]
    parameters: int = 0
    stages: int = 0
    plain_bytes: int | None = None
    plain_held_bytes: int | None = None
    predicted_bytes: int | None = None
    predicted_over_plain: float | None = None
    predicted_over_plain_held: float | None = None
    limits: list[Within] = field(default_factory=list)
    seconds: float = 0.0
    revision: str = ""


def visit(name: str) -> Row:
    """Everything about one model."""
    start = time.perf_counter()
    model = make(name)
    sample = ENTRIES[name].sample()
    row = Row(name, [list(tensor.shape) for tensor in sample], revision=revision())
    row.parameters = sum(parameter.numel() for parameter in model.parameters())
    plain = copy.deepcopy(model)
    expected = _train(plain, sample)
    row.plain_bytes, row.plain_held_bytes = _peak(plain, sample), _peak(plain, sample, output_held=True)
    del plain
    try:  # on a copy, too: there are models that hold on to what a forward computed, and cannot be copied after one
        chain = remat.profile(copy.deepcopy(model), sample if len(sample) > 1 else sample[0])
    except Exception as error:
        row.limits = [_failed(Within(kind), error) for kind in ("least", "middle")]
        row.seconds = time.perf_counter() - start
        return row
    least, most = remat.minimum_budget(chain, "fastest"), store_all_peak(chain)
    row.stages, row.predicted_bytes = chain.length - 1, most
    row.predicted_over_plain, row.predicted_over_plain_held = most / row.plain_bytes, most / row.plain_held_bytes
    for kind, limit in (("least", least), ("middle", (least + most) // 2)):
        row.limits.append(_within(Within(kind, limit), model, sample, expected))
        gc.collect()
    row.seconds = time.perf_counter() - start
    return row


def _within(found: Within, model: nn.Module, sample: Sample, expected: Left) -> Within:
    """Trains a copy of the model within a limit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _judge(found, model, sample, expected)
        except Exception as error:
            _failed(found, error)
    found.warned = sorted({str(warning.message) for warning in caught})
    return found


def _judge(found: Within, model: nn.Module, sample: Sample, expected: Left) -> None:
    given = sample if len(sample) > 1 else sample[0]
    fitted = remat.fit(copy.deepcopy(model), given, memory=found.limit_bytes, quiet=True)
    differing = _differing(expected, _train(fitted, sample))
    found.measured_bytes = _peak(fitted, sample)
    found.measured_held_bytes = _peak(fitted, sample, output_held=True)
    found.measured_over_limit = found.measured_bytes / found.limit_bytes
    if differing:
        again = _differing(expected, _train(copy.deepcopy(model), sample))
        alone = "" if not again else f"; plain PyTorch differs from itself in {len(again)}"
        found.outcome = "bits"
        found.text = f"{len(differing)} of {len(expected)} differ: {', '.join(differing[:8])}{alone}"
    elif max(found.measured_bytes, found.measured_held_bytes) > found.limit_bytes:
        found.outcome = "over"


def _failed(found: Within, error: Exception) -> Within:
    found.outcome = "refused" if isinstance(error, remat.RematError) else "error"
    found.text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    found.where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
    return found


# The file ------------------------------------------------------------------------------------------------------------


def _write(file: Path, rows: dict[str, dict[str, Any]]) -> None:
    import timm
    import torchvision

    versions = {"timm": timm.__version__, "torchvision": torchvision.__version__}
    content = {"note": NOTE, "machine": {**origin(), **versions}, "rows": list(rows.values())}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, (json.dumps(content, indent=1) + "\n").encode())


def _line(row: dict[str, Any]) -> str:
    outcomes = []
    for within in row["limits"]:
        share = within["measured_over_limit"]
        outcomes.append(f"{within['limit']} {within['outcome']}" + (f" {share:.4f}" if share is not None else ""))
    ratio = row["predicted_over_plain"]
    predicted = "" if ratio is None else f", predicted / plain {ratio:.4f}"
    return f"{row['model']}: {', '.join(outcomes)}{predicted}; {row['stages']} stages, {row['seconds']:.0f} s"


def zoo(names: Sequence[str], file: Path, *, visit_again: bool = False) -> list[dict[str, Any]]:
    """Visits the models that the file does not have yet; returns the rows of `names`."""
    rows = {row["model"]: row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
    for name in names:
        if name in rows and not visit_again:
            continue
        rows[name] = asdict(visit(name))
        _write(file, rows)
        print(_line(rows[name]), flush=True)
        gc.collect()
    return [rows[name] for name in names]


def _matching(asked: Sequence[str]) -> Iterator[str]:
    for name in asked:
        found = [known for known in ENTRIES if name in (known, known.partition("/")[2])]
        if not found:
            raise SystemExit(f"unknown model {name!r}; choose of {', '.join(ENTRIES)}")
        yield from found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models, again if the file has them")
    parser.add_argument("--out", type=Path, default=RESULTS / "zoo.json", metavar="FILE")
    given = parser.parse_args()
    torch.set_num_threads(1)  # several may add up in another order each time
    operators = declare_operators()
    rows = zoo(list(_matching(given.only or ENTRIES)), given.out, visit_again=bool(given.only))
    counts = collections.Counter(within["outcome"] for row in rows for within in row["limits"])
    print(f"{len(rows)} models: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    del operators  # not before: the declarations would go with it


if __name__ == "__main__":
    main()
