"""Reads a model's matrices and norms from a checkpoint, as the backend and the way of holding them want them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from engine.loading import Checkpoint
from engine.memory import return_freed
from engine.model_config import ModelConfig
from engine.models.int8_weights import (
    MOST_GATED,
    Projection,
    hadamard,
    read_rotated,
    read_turned,
    turn,
    write_turned,
)
from engine.packed_weights import Parts
from engine.quantization import AS_LOADED, W8A8, W8A16
from twinpool.errors import ConfigError

# Of old Llama files, which the config implies; and of layers that go by a token's id, where only choosing needs it.
_NEEDLESS = ("rotary_emb.inv_freq", "gate.bias", "gate.e_score_correction_bias")


class Reader:
    """Names of transformers, shapes of the config; for int8 in the turned basis of engine.models.int8_weights.

    int8_cache: whether the cache holds int8, which attention may want to prepare for; latent_form: see
    engine.models.latent_attention; parts: where packed parts are kept, see engine.packed_weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        ops: ModuleType,
        dtype: torch.dtype,
        *,
        int8_cache: bool,
        weights: str,
        latent_form: str,
        parts: Parts,
    ) -> None:
        self.config, self.checkpoint, self.ops, self.dtype = config, checkpoint, ops, dtype
        self.int8_cache, self.weights, self.latent_form = int8_cache, weights, latent_form
        self._parts = parts
        self.is_turned = weights != AS_LOADED

    def part(self, name: str, make: Callable[[], Any], *, of_one_format: bool = True) -> Any:
        """A part of the model that workers of one host may share, by `make` if nobody has made it yet.

        of_one_format: int8 matrices in it are as `weights` says, so that a worker of the other int8 format reads them
        as its own.
        """
        given = {"ops": self.ops, "config": self.config, **({"weights": self.weights} if of_one_format else {})}
        made = self._parts.part(name, make, given)
        return_freed()
        return made

    def layer(self, index: int, make: Callable[[int], Any]) -> Any:
        """Layer `index` as a part. Raises ConfigError when the checkpoint holds more of it than `make` asks for."""
        return self.part(f"layer {index}", lambda: self._whole(index, make))

    def _whole(self, index: int, make: Callable[[int], Any]) -> Any:
        """A config.json that does not know of a bias, a norm or a compressor would be another model, without an error
        anywhere."""
        made, checkpoint = make(index), self.checkpoint
        for name in checkpoint.untaken(index):
            if not name.endswith(_NEEDLESS):
                raise ConfigError(
                    f"{checkpoint.where(name)} has no place in layer {index} of the {self.config.model_type} that "
                    "config.json describes, which implies no tensor of that name"
                )
        return made

    def embedding(self) -> torch.Tensor:
        table = self.take_embedding()
        return turn(table).to(self.dtype) if self.is_turned else table

    def take_embedding(self) -> torch.Tensor:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self.checkpoint.take("model.embed_tokens.weight", shape, self.dtype)

    def head(self, embedding: torch.Tensor, norm: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The packed output layer and the weights of the norm before it."""
        if not self.config.tie_word_embeddings:
            weight = self.checkpoint.take("lm_head.weight", embedding.shape, self.dtype)
        else:
            weight = self.take_embedding() if self.is_turned else embedding
            self._check_tied(weight)
        (weight, _), norm = self.reading(norm, (weight, None))
        # Few rows pass through it and its errors reach the tokens at once: never int8 by int8.
        return self.ops.pack_linear(weight, None, W8A16 if self.weights == W8A8 else self.weights), norm

    def _check_tied(self, embedding: torch.Tensor) -> None:
        """Files of tied models may hold the matrix twice, but not two matrices."""
        checkpoint, name = self.checkpoint, "lm_head.weight"
        if name in checkpoint and not torch.equal(checkpoint.take(name, embedding.shape, self.dtype), embedding):
            raise ConfigError(
                f"{checkpoint.where(name)} is not the embedding model.embed_tokens.weight, which config.json implies "
                "(tie_word_embeddings)"
            )

    def reading(self, norm: torch.Tensor, *projections: Projection) -> tuple[Any, ...]:
        """Projections that read the residuals through `norm`, and the norm's weights: for int8, in the turned basis."""
        if not self.is_turned:
            return *projections, norm
        return *(read_turned(each, norm) for each in projections), torch.ones_like(norm)

    def writing(self, projection: Projection) -> Projection:
        return write_turned(projection) if self.is_turned else projection

    def gated_rotation(self, width: int) -> Any:
        """What goes into a down projection of `width` inputs is multiplied with; None where it stays as it is."""
        if self.weights == AS_LOADED:
            return None
        return self.ops.pack_linear(hadamard(width, MOST_GATED).to(self.dtype), None)

    def reading_gated(self, down: Projection) -> Projection:
        """A down projection that writes to the residuals, for inputs that `gated_rotation` was applied to."""
        return self.writing(read_rotated(down) if self.is_turned else down)

    def norm(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.checkpoint.take(f"{name}.weight", (size,), dtype or self.dtype)

    def projection(
        self, name: str, out_size: int, in_size: int, has_bias: bool = False, dtype: torch.dtype | None = None
    ) -> Projection:
        dtype = dtype or self.dtype
        bias = self.checkpoint.take(f"{name}.bias", (out_size,), dtype) if has_bias else None
        return self.checkpoint.take(f"{name}.weight", (out_size, in_size), dtype), bias

    def pack(self, *parts: Projection) -> Any:
        """One linear of all parts (which have a bias or not alike), stacked along the output."""
        weight = parts[0][0] if len(parts) == 1 else torch.cat([weight for weight, _ in parts])
        biases = [bias for _, bias in parts if bias is not None]
        return self.ops.pack_linear(weight, torch.cat(biases) if biases else None, self.weights)
