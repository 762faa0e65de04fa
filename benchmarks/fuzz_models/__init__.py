"""Random models for the fuzz, as people write them: rows of modules in an `nn.Sequential`, and classes of their own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from benchmarks.fuzz_models.answering import Answering, InPlaceConvolutions, PostNorm, Stack
from benchmarks.fuzz_models.branching import (
    DeeplySupervised,
    Dense,
    Gates,
    Language,
    LayerScaled,
    LibraryEncoder,
    Mixer,
    Recurrent,
    Towers,
    Unrolled,
    Vgg,
)
from benchmarks.fuzz_models.conditional import (
    Latents,
    LayerDrop,
    LongSkips,
    conditioned,
    graph,
    images,
    in_rows,
    numbers,
    pair,
    siamese,
    variational,
    worded,
)
from benchmarks.fuzz_models.drawing import Draw, Program
from benchmarks.fuzz_models.library import of_transformers, vision
from benchmarks.fuzz_models.rows import sequential
from benchmarks.fuzz_models.seasoning import seasoned
from benchmarks.fuzz_models.with_side_inputs import (
    Auxiliary,
    Branches,
    Captioner,
    EncoderDecoder,
    InPlacePositions,
    Looped,
    MixtureOfExperts,
    SideInputs,
    UNet,
)

OTHERS: dict[str, Callable[[Draw], Program]] = {
    "stack": numbers(Stack), "post-norm": numbers(PostNorm), "in-place convolutions": images(InPlaceConvolutions),
    "encoder-decoder": worded(EncoderDecoder, ["source", "target"]),
    "captioner": worded(Captioner, ["image", "tokens"]), "unet": images(UNet),
    "branches": numbers(lambda draw, width: Branches(draw, width, apart=False)), "pair": pair,
    "looped": numbers(Looped), "side inputs": worded(SideInputs, ["tokens", "keep"]),
    "in-place positions": in_rows(InPlacePositions, sized=True), "mixture of experts": in_rows(MixtureOfExperts),
    "auxiliary": numbers(Auxiliary), "language": worded(Language, ["tokens"]), "dense": images(Dense),
    "unrolled": in_rows(Unrolled), "recurrent": in_rows(Recurrent), "variational": variational, "siamese": siamese,
    "vgg": images(Vgg), "mixer": in_rows(Mixer, sized=True), "layer scaled": images(LayerScaled),
    "deeply supervised": numbers(DeeplySupervised), "gates": images(Gates),
    "library encoder": worded(LibraryEncoder, ["tokens"], both=False),
    "library transformer": worded(LibraryEncoder, ["tokens", "target"], both=True),
    "towers": worded(Towers, ["image", "tokens"]), "conditioned": conditioned, "latents": in_rows(Latents),
    "graph": graph, "long skips": numbers(LongSkips), "layer drop": numbers(LayerDrop, wanders=True),
    "GPT-2": of_transformers("GPT2", "GPT2LMHeadModel"), "BERT": of_transformers("Bert", "BertForMaskedLM"),
    "Llama": of_transformers("Llama", "LlamaForCausalLM"), "Mistral": of_transformers("Mistral", "MistralForCausalLM"),
    "Mixtral": of_transformers("Mixtral", "MixtralForCausalLM"),
    "T5": of_transformers("T5", "T5ForConditionalGeneration"),
    "BART": of_transformers("Bart", "BartForConditionalGeneration"),
    "GPT-Neo": of_transformers("GPTNeo", "GPTNeoForCausalLM"),
    "ViT": vision("ViT"), "ConvNeXt": vision("ConvNext"), "ResNet": vision("ResNet"),
}  # fmt: skip

__all__ = ["Draw", "Program", "in_words", "other", "seasoned", "sequential"]


def other(draw: Draw) -> Program:
    """A model that is no `nn.Sequential`."""
    family = draw.choice(sorted(OTHERS))
    program = OTHERS[family](draw)
    program.notes.append(family)
    if isinstance(program.model, Answering) and program.model.form != "tensor":
        program.notes.append(f"returns a {program.model.form.replace('loss in a', 'loss in a')}")
    return program


SIZES = ("in_features", "out_features", "num_embeddings", "in_channels", "out_channels", "input_size", "hidden_size")


def in_words(model: nn.Module, longest: int = 400) -> str:
    """The modules of a model by class, those in a row in brackets."""

    def word(module: nn.Module) -> str:
        name = type(module).__name__
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            return f"[{', '.join(map(word, module))}]"
        numbers = [getattr(module, key, None) for key in SIZES]
        sizes = [str(number) for number in numbers if isinstance(number, int)]
        if sizes:
            return f"{name} {'-'.join(sizes)}"
        children = list(module.children())
        return f"{name}({', '.join(map(word, children))})" if children and len(children) < 8 else name

    text = word(model)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
