"""Attention for TorchTitan (0.3 or newer): an inner attention, a converter that puts it into a model, a save list.

    config.model_spec = model_registry("8B", attn_backend="varlen", converters=[AttentionConverter.Config()])
    config.activation_checkpoint = SelectiveAC.Config()

The inner attention and its configuration are subclasses of TorchTitan's `VarlenAttention`. By that class TorchTitan decides
to build offsets for packed documents (`VarlenMetadata`), to give layers their windows, and to refuse what offsets cannot
do there, such as its own context parallelism; a stranger would get no metadata at all. Nothing else is inherited: no
flash-attention is activated.

As in `VarlenAttention`, q, k and v are cast to bfloat16, since rotary embeddings and a CPU run leave float32 behind, and
`out_transform` gets the output with its LSE (attention sinks), which is differentiable here.

TorchTitan's selective checkpointing knows operators by name and computes all others again. `SelectiveAC` adds ours, so that
attention runs forward once a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

from flamia import ops, validation
from flamia.api import attention_varlen
from flamia.ops import SAVE_OPS

Transform = Callable[[Tensor, Tensor], Tensor]


class Attention(VarlenAttention):
    """TorchTitan's inner attention, by flamia. `recipe` is a recipe's string, "" the default; `backend` as everywhere."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        recipe: str = ""
        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        super(VarlenAttention, self).__init__()  # not VarlenAttention's own, which activates a flash-attention
        ops.check_backend(config.backend)
        self.recipe = validation.recipe_text(config.recipe or None)
        self.backend = config.backend
        self.window_size = config.window_size

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_masks: VarlenMetadata,
        scale: float | None,
        out_transform: Transform | None,
        others: dict[str, Any],
    ) -> Tensor:
        """q, k, v: (batch, tokens, heads, dim), or (tokens, heads, dim) as later versions pack them."""
        if not isinstance(attention_masks, VarlenMetadata):
            raise ValueError(
                f"attention_masks must be VarlenMetadata, got {type(attention_masks).__name__}: the model builds it from "
                f"positions if the first layer's inner_attention is flamia's or VarlenAttention too"
            )
        for name, value in others.items():
            if name != "enable_gqa" and value is not None:  # grouped queries need no flag here
                raise validation.UnsupportedError(f"{name} is not supported by flamia's inner attention; leave it out")
        with spmd.no_typecheck():  # offsets are of this rank, and so are the operator's tensors
            rows, lse = attention_varlen(
                q.flatten(0, -3).to(torch.bfloat16),
                k.flatten(0, -3).to(torch.bfloat16),
                v.flatten(0, -3).to(torch.bfloat16),
                attention_masks.cu_seq_q,
                cu_seqlens_k=attention_masks.cu_seq_k,
                window=self.window_size,
                softmax_scale=scale,
                recipe=self.recipe,
                backend=self.backend,
                return_lse=True,
            )
        _same_type(rows, q.flatten(0, -3), (0, 1, 2))
        o = rows.unflatten(0, q.shape[:-2]).to(q.dtype)
        if out_transform is None:
            return o
        _same_type(lse, q.flatten(0, -3), (1, 0))
        return out_transform(o, lse.transpose(0, 1).unflatten(0, q.shape[:-2]))

    # The names of the first three arguments are keys of TorchTitan's sharding plans.
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Transform | None = None,
        **others: Any,
    ) -> Tensor:
        return self._attend(q_BLNH, k_BLNH, v_BLNH, attention_masks, scale, out_transform, others)

    def _forward_packed(
        self,
        q_TNH: Tensor,
        k_TNH: Tensor,
        v_TNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Transform | None = None,
        **others: Any,
    ) -> Tensor:
        return self._attend(q_TNH, k_TNH, v_TNH, attention_masks, scale, out_transform, others)

    if "q_TNH" in inspect.signature(VarlenAttention.forward).parameters:
        forward = _forward_packed  # type: ignore[assignment]


def _same_type(x: Tensor, like: Tensor, axes: tuple[int, ...]) -> None:
    """TorchTitan's SPMD types of an output: those of q, whose axes `axes` it has. Nothing where types are not checked."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        spec = get_partition_spec(like)
        spec = None if spec is None else spmd.PartitionSpec(*(spec[axis] for axis in axes))
        spmd.assert_type(x, spmd.get_local_type(like), spec)


class AttentionConverter(ModelConfigConverter):
    """Puts `Attention` in the place of every `VarlenAttention` of a model's configuration, its windows kept."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        recipe: str = ""
        backend: str = "auto"

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        found = list(model_config.traverse(VarlenAttention.Config))
        if not found:
            flex = any(True for _ in model_config.traverse(FlexAttention.Config))
            raise ValueError(
                f"no VarlenAttention to replace in {type(model_config).__qualname__}"
                f"{', which has FlexAttention' if flex else ''}: build the model with attn_backend='varlen'"
            )
        for _, old, parent, place in found:
            new = Attention.Config(
                window_size=old.window_size,
                param_init=old.param_init,
                sharding_config=old.sharding_config,
                recipe=self.config.recipe,
                backend=self.config.backend,
            )
            if parent is None:
                return new
            if isinstance(place, int):
                parent[place] = new
            else:
                setattr(parent, place, new)
        return model_config


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """TorchTitan's selective activation checkpointing, which also keeps what flamia's forward computed."""

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | set(SAVE_OPS)
