"""Models of the fuzz that are of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.fuzz_models.drawing import Draw, Given, Program


def of_transformers(kind: str, model: str) -> Callable[[Draw], Program]:
    """A language model with labels; the names of sizes differ between the families of configurations."""

    def program(draw: Draw) -> Program:
        import transformers

        transformers.logging.set_verbosity_error()
        words, length, width = draw.randint(40, 200), draw.randint(8, 24), draw.choice([16, 32, 48])
        layers, heads = draw.randint(2, 4), draw.choice([2, 4])
        options: dict[str, Any] = {"vocab_size": words, "attn_implementation": draw.choice(["eager", "sdpa"])}
        options["use_cache"] = False  # as remat has it in training; what goes through a cache is rounded otherwise
        if kind == "GPTNeo":
            options["attn_implementation"] = "eager"
        options |= _sizes(kind, draw, width, layers, heads, length)
        if draw.chance(0.15):
            options["output_hidden_states"] = True
        config = getattr(transformers, f"{kind}Config")(**options)
        made = getattr(transformers, model)(config)
        tokens = Given((length,), words)
        inputs = {"input_ids": tokens, "labels": tokens}
        if draw.chance(0.4):
            inputs["attention_mask"] = Given((length,), 1)
        found = LibraryProgram(made.train(), inputs, draw.randint(2, 6), "dict", own_loss=True)
        found.same_labels = draw.chance(0.5)
        return found

    return program


def _sizes(kind: str, draw: Draw, width: int, layers: int, heads: int, length: int) -> dict[str, Any]:
    if kind == "GPT2":
        return {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": length, "bos_token_id": 0,
                "eos_token_id": 1}  # fmt: skip
    if kind == "T5":
        return {"num_layers": layers, "d_model": width, "d_kv": 8, "num_heads": heads, "d_ff": 2 * width,
                "decoder_start_token_id": 0, "feed_forward_proj": draw.choice(["relu", "gated-gelu"])}  # fmt: skip
    if kind == "Bart":
        return {"encoder_layers": layers, "decoder_layers": layers, "d_model": width, "encoder_attention_heads": heads,
                "decoder_attention_heads": heads, "encoder_ffn_dim": 2 * width, "decoder_ffn_dim": 2 * width,
                "max_position_embeddings": length + 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                "decoder_start_token_id": 2}  # fmt: skip
    if kind == "GPTNeo":
        return {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "hidden_size": width,
                "num_heads": heads, "max_position_embeddings": length, "window_size": 4, "bos_token_id": 0,
                "eos_token_id": 1}  # fmt: skip
    common: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads,
                              "intermediate_size": 2 * width, "max_position_embeddings": 2 * length}  # fmt: skip
    if kind in {"Llama", "Mistral", "Mixtral"}:
        common["num_key_value_heads"] = draw.choice([1, 2])
    if kind == "Mistral":
        common["sliding_window"] = draw.choice([None, 6])
    if kind == "Mixtral":
        common |= {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return common


@dataclass
class LibraryProgram(Program):
    """A program whose labels may be its tokens, and whose mask leaves the end of some rows out."""

    same_labels: bool = False

    def batch(self, count: int) -> Any:
        made = super().batch(count)
        if self.same_labels:
            made["labels"] = made["input_ids"]
        if "attention_mask" in made:
            made["attention_mask"] += 1
            made["attention_mask"][0, -3:] = 0
        return made


def vision(kind: str) -> Callable[[Draw], Program]:
    def program(draw: Draw) -> Program:
        import transformers

        transformers.logging.set_verbosity_error()
        width = draw.choice([16, 32])
        options: dict[str, Any] = {"num_labels": 5}
        if kind == "ViT":
            options |= {"num_hidden_layers": draw.randint(2, 4), "hidden_size": width, "num_attention_heads": 2,
                        "intermediate_size": 2 * width, "image_size": 16, "patch_size": 4,
                        "hidden_dropout_prob": draw.choice([0.0, 0.1])}  # fmt: skip
        elif kind == "ConvNext":
            options |= {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "drop_path_rate": 0.1}
        else:
            options |= {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}
        model = getattr(transformers, f"{kind}ForImageClassification")(
            getattr(transformers, f"{kind}Config")(**options)
        )
        inputs = {"pixel_values": Given((3, 16, 16)), "labels": Given((), 5)}
        return Program(model.train(), inputs, draw.randint(2, 6), "dict", own_loss=True)

    return program
