"""The compiled forward of an EAGLE head.

Legend: B batch rows, T tokens of a window, F features, H hidden, S slots, V rows of its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specgym.engine.compiled.layout import Epilogue, Op, Token
from specgym.engine.compiled.llama import (
    alternate_blocks,
    cache_addresses,
    fill_tokens,
    want,
)
from specgym.engine.compiled.packing import kind_of, pack
from specgym.engine.compiled.program import Given, Heads, Machine, Norm, Program, thread_count
from specgym.engine.compiled.rotary import make_table
from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.eagle import EagleHead, EagleLayer


class CompiledEagle:
    """An EAGLE head's forward in one compiled call; its weights are copied.

    Two orders of operations: one reads the target's features, one goes on from the head's own last
    output where every row guesses, which spares joining features.

    Args:
        head: The head, on the CPU.
        embedding: Embedding of the target's tokens, [vocabulary, H].
        rows: Its vocabulary head, [V, H].
    """

    def __init__(self, head: EagleHead, embedding: torch.Tensor, rows: torch.Tensor):
        config, shape = head.shape.config, head.shape
        self.program = program = Program()
        self.embedding = embedding
        self.kind = kind_of(embedding.dtype)
        self.rotary, self.table = head.rotary, np.empty((0, 2, 1), np.float32)
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        assert config.head_dim is not None
        self.heads = Heads(config.num_attention_heads, kv_heads, config.head_dim)
        self.feature_size, self.num_outputs = shape.target_hidden_size, len(rows)
        size, self.is_wide = config.hidden_size, shape.is_wide
        self.epsilon = config.rms_norm_eps
        width = shape.num_features + (0 if self.is_wide else size)
        self.joined = program.buffer(width)
        first = 0 if self.is_wide else size
        self.features = program.columns(self.joined, first, shape.num_features)
        self.embeds = (
            program.buffer(size) if self.is_wide else program.columns(self.joined, 0, size)
        )
        self.parts = [
            program.columns(self.features, index * self.feature_size, self.feature_size)
            for index in range(max(len(shape.taps), 1))
        ]
        self.states = program.buffer(size)
        self.raw = program.buffer((self.heads.num_heads + 2 * kv_heads) * self.heads.size)
        self.queries = program.buffer(self.heads.num_heads * self.heads.padded_size)
        self.mixed = program.buffer(self.heads.num_heads * self.heads.size)
        self.inner = program.buffer(config.intermediate_size)
        program.embed(embedding, self.embeds, self.kind)
        join = pack(program.arena, [head.fc.weight])
        bias = program.arena.keep_vector(head.fc.bias)
        if not self.is_wide:  # joins guesses like features
            program.move(Op.GUESS, target=self.features, size=size)
        program.linear(self.joined, join, self.states, bias=bias)
        if self.is_wide:
            program.move(Op.GUESS, target=self.states, size=size)
        layers = [head.midlayer] if self.is_wide else []
        layers += [each for each in head.layers.values() if isinstance(each, EagleLayer)]
        for index, layer in enumerate(layers):
            self.add_layer(layer, index)
        norm = self.norm(head.norm) if self.is_wide else None
        program.linear(self.states, pack(program.arena, [rows]), None, norm=norm)
        self.machine = Machine(program)
        self.columns: tuple[int, ...] = ()
        self.width = 0
        self.arranged: tuple[bool, bool] | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.arranged = None  # as soon as it runs

    def norm(self, module: Any) -> Norm:
        """A norm as programs take it."""
        return Norm(self.program.arena.keep_vector(module.weight), self.epsilon)

    def add_layer(self, layer: EagleLayer, index: int) -> None:
        """Add one layer's operations."""
        program, arena, attention = self.program, self.program.arena, layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight = pack(arena, [torch.cat([each.weight.detach() for each in projections])])
        biases: list[torch.Tensor] = [each.bias for each in projections if each.bias is not None]
        bias = arena.keep_vector(torch.cat(biases) if biases else None)
        norm = None if layer.input_layernorm is None else self.norm(layer.input_layernorm)
        if layer.hidden_norm is not None:
            assert norm is not None
            second = self.states, self.norm(layer.hidden_norm)
            program.linear(self.embeds, weight, self.raw, norm=norm, bias=bias, second=second)
        else:
            program.linear(self.states, weight, self.raw, norm=norm, bias=bias)
        program.rotate(self.raw, self.queries, self.heads, index, self.kind)
        scale = self.heads.size**-0.5
        program.attend(self.queries, self.mixed, self.heads, index, self.kind, scale=scale)
        output = pack(arena, [attention.o_proj.weight])
        bias = arena.keep_vector(attention.o_proj.bias)
        program.linear(self.mixed, output, self.states, bias=bias, epilogue=Epilogue.ADD)
        mlp, norm = layer.mlp, self.norm(layer.post_attention_layernorm)
        gate_up = pack(arena, [mlp.gate_proj.weight, mlp.up_proj.weight], alternate=True)
        bias = 0
        if mlp.gate_proj.bias is not None:
            bias = arena.keep_vector(alternate_blocks([mlp.gate_proj.bias, mlp.up_proj.bias]))
        program.linear(
            self.states, gate_up, self.inner, norm=norm, bias=bias, epilogue=Epilogue.GATE
        )
        bias = arena.keep_vector(mlp.down_proj.bias)
        down = pack(arena, [mlp.down_proj.weight])
        program.linear(self.inner, down, self.states, bias=bias, epilogue=Epilogue.ADD)

    def set_columns(self, columns: Sequence[int], width: int) -> None:
        """Say where its features begin among the ``width`` numbers that the target keeps."""
        self.columns, self.width, self.arranged = tuple(columns), width, None

    def arrange(self, *, reads: bool, has_head: bool) -> None:
        """Put the operations in order: with features to read or guesses alone, with the head."""
        if self.arranged == (reads, has_head):
            return
        self.arranged = reads, has_head
        gathers = Program()
        for part, column in zip(self.parts, self.columns, strict=True):
            gathers.move(
                Op.GATHER,
                target=part,
                size=self.feature_size,
                kind=self.kind,
                column=column,
                width=self.width,
            )
        embed, *rest = self.program.ops if has_head else self.program.ops[:-1]
        if not reads and self.is_wide:
            rest = rest[1:]  # nothing to join
        self.machine.set_ops([embed, *(gathers.ops if reads else ()), *rest])

    def forward(
        self,
        cache: MaskedKVCache,
        fed: Sequence[Sequence[int]],
        sources: Sequence[Sequence[int]],
        features: torch.Tensor,
        guesses: np.ndarray | None,
        out: torch.Tensor | None,
    ) -> np.ndarray:
        """Feed each row its tokens; the caller then advances the cache.

        Args:
            cache: Has room for the longest row.
            fed: Token ids of each row.
            sources: For each token the slot of its features, -1 for its row's guess.
            features: What the target keeps, [B, S, width].
            guesses: float32 [B, H]; None where no token needs one.
            out: Gets logits of each row's last token, float32 [B, 1, V]; None spares the head.

        Returns:
            The last output of each row, float32 [B, H]: what stands for the next features.
        """
        num_tokens = sum(map(len, fed))
        reads = any(source >= 0 for row in sources for source in row)
        self.arrange(reads=reads, has_head=out is not None)
        if cache.num_slots > len(self.table):
            self.table = make_table(self.rotary, 1 << (cache.num_slots - 1).bit_length())
        machine = self.machine
        machine.make_room(num_tokens, cache.num_slots, thread_count(self.program))
        firsts = fill_tokens(machine.tokens, cache, fed)
        num_source_slots = features.shape[1]
        flat = [
            -1 if slot < 0 else row * num_source_slots + slot
            for row, slots in enumerate(sources)
            for slot in slots
        ]
        machine.tokens[:num_tokens, Token.SOURCE] = flat
        num_wanted = 0
        if out is not None:
            num_wanted = want(machine.wanted, firsts, fed, out, last_only=True)
        given = Given(
            num_slots=cache.num_slots,
            caches=cache_addresses(cache, self.heads, self.embedding.dtype).ctypes.data,
            valid=cache.valid_BS.data_ptr(),
            rotary=self.table.ctypes.data,
            features=features.data_ptr(),
            guesses=0 if guesses is None else guesses.ctypes.data,
        )
        machine.run(num_tokens, num_wanted, given)
        last = [max(first + len(row) - 1, 0) for first, row in zip(firsts, fed, strict=True)]
        return machine.rows(self.states, last)
