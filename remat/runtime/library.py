"""What libraries offer themselves to save activation memory, to be compared with; none of it takes bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from remat.errors import RematError
from remat.runtime.execution import Execution

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Checkpointing(Execution):
    """Steps under the checkpointing of the model's own library: of every block."""

    name: str = "gradient_checkpointing"

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model checkpoints every block, by the switch of its library; afterwards the switch is as before.

        Libraries switch it off less completely than on: transformers' models keep a hook on their embeddings.

        Raises:
            RematError: the model has no such option.
        """
        before = {part: (dict(vars(part)), dict(part._forward_hooks)) for part in model.modules()}
        prefix = _names(model)
        if prefix is not None:
            getattr(model, f"{prefix}_enable")(**{f"{prefix}_kwargs": {"use_reentrant": False}})
        elif callable(getattr(model, "set_grad_checkpointing", None)):
            switch: Any = model.set_grad_checkpointing
            switch(True)
        else:
            raise RematError(
                f"{type(model).__name__} has neither gradient_checkpointing_enable() nor set_grad_checkpointing()"
            )
        changed = {
            part: [name for name, value in vars(part).items() if name not in was or was[name] is not value]
            for part, (was, _) in before.items()
        }
        try:
            yield
        finally:
            for part, (was, hooks) in before.items():
                for name in changed[part]:
                    if name in was:
                        vars(part)[name] = was[name]
                    else:
                        vars(part).pop(name, None)
                for added in part._forward_hooks.keys() - hooks.keys():
                    del part._forward_hooks[added]


@dataclass(frozen=True)
class BlockCheckpointing(Execution):
    """Steps with every block under `torch.utils.checkpoint` (`use_reentrant=False`), as far as a model has blocks.

    Attributes:
        selective: it saves what matrix products, convolutions and attention compute, and recomputes the rest
            (`create_selective_checkpoint_contexts`).
    """

    name: str = "block_checkpointing"
    selective: bool = False

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Raises RematError where the model has no blocks."""
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

        options: dict[str, Any] = {"use_reentrant": False}
        if self.selective:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _saves_products)
        blocks = blocks_of(model)
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, **options)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of the longest list or `nn.Sequential` of modules of one class."""
    from torch import nn

    lists: list[list[nn.Module]] = [
        [*part] for part in model.modules() if isinstance(part, (nn.ModuleList, nn.Sequential))
    ]
    alike = [each for each in lists if len(each) > 1 and len({type(member) for member in each}) == 1]
    if not alike:
        raise RematError(f"{type(model).__name__} has no list of blocks to checkpoint one by one")
    longest = max(len(each) for each in alike)
    return list(dict.fromkeys(next(each for each in alike if len(each) == longest)))


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")


def _saves_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    name = operator.overloadpacket.__name__
    saved = name in _PRODUCTS or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class Compiled(Execution):
    """Steps of the model as `torch.compile` makes it, with `activation_memory_budget` set to `share`."""

    share: float

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"torch.compile@{self.share:g}"

    def prepared(self, model: nn.Module) -> Callable[..., Any]:
        """The model compiled; `share` is of what autograd would keep of its graph."""
        import torch
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        # A function of its own for each share: compiled code is found again by its backend.
        def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            with config.patch(activation_memory_budget=self.share):
                return compile_fx(graph, inputs)

        return torch.compile(model, backend=backend)


def has_checkpointing(model: nn.Module) -> bool:
    """Whether the model's library offers checkpointing of its blocks: transformers and timm do, for most models."""
    if _names(model) is not None:
        return bool(getattr(model, "supports_gradient_checkpointing", True))
    return callable(getattr(model, "set_grad_checkpointing", None))


def _names(model: nn.Module) -> str | None:
    """What the methods of transformers' models begin with: the newer name where both are there."""
    prefixes = ("activation_checkpointing", "gradient_checkpointing")
    return next((prefix for prefix in prefixes if callable(getattr(model, f"{prefix}_enable", None))), None)
