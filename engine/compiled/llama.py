"""Compiled forwards of Llama-shaped models: which there are, and the program of each.

Legend: B batch rows, T tokens of a window, N tokens fed, S slots, V rows of the head, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    OlmoeForCausalLM,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from specgym.engine.compiled.layout import Epilogue, Op, Token
from specgym.engine.compiled.packing import kind_of, moved, pack
from specgym.engine.compiled.program import (
    Buffer,
    Given,
    Heads,
    Machine,
    Norm,
    Program,
    thread_count,
)
from specgym.engine.compiled.rotary import is_static, make_table
from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.cache_layers import allocate
from specgym.engine.forward.linears import is_plain_linear

FAMILIES = (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    MixtralForCausalLM,
    OlmoeForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
)


def why_not_compiled(model: Any) -> str:
    """Why a model has no compiled forward; empty when it has one."""
    if type(model) not in FAMILIES:
        return f"there is none for a {type(model).__name__}"
    if model.device.type != "cpu":
        return f"there is none on {model.device.type}"
    config = model.config
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    names = ("_proj", "lm_head", "shared_expert_gate")
    projections = [module for name, module in model.named_modules() if name.endswith(names)]
    if not all(map(is_plain_linear, projections)):
        return "its linear layers are quantized or adapted"
    if not is_static(model.model.rotary_emb):
        return "its rotary factors depend on the length of a text"
    sizes = (config.hidden_size, *inner_sizes(model))
    if any(size % 16 for size in sizes) or head_size(config) % 2:
        return f"its sizes {sizes} are not all multiples of 16"
    return ""


def inner_sizes(model: Any) -> list[int]:
    """Widths of the feed-forward blocks."""
    names = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    return [size for name in names if (size := getattr(model.config, name, None))]


def head_size(config: Any) -> int:
    """Numbers of a head, D."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class CompiledLlama:
    """A Llama-shaped model's forward in one compiled call.

    Args:
        model: The transformers model; its layers are taken over, so it must not be used after.

    Attributes:
        num_outputs: V.

    Raises:
        ValueError: If another member has taken the model over.
    """

    def __init__(self, model: Any):
        config = model.config
        if len(model.model.layers) != config.num_hidden_layers:
            raise ValueError(
                "model: its layers were taken over by another member; load a model for each"
            )
        self.program = program = Program()
        self.embedding = model.model.embed_tokens.weight.detach()
        self.kind = kind_of(self.embedding.dtype)
        if self.kind and self.embedding.dtype != torch.float32:
            self.embedding = self.embedding.float()
        self.heads = Heads(
            config.num_attention_heads, config.num_key_value_heads, head_size(config)
        )
        self.rotary, self.table = model.model.rotary_emb, np.empty((0, 2, 1), np.float32)
        self.states = program.buffer(config.hidden_size)
        heads = self.heads
        self.raw = program.buffer((heads.num_heads + 2 * heads.num_kv_heads) * heads.size)
        self.queries = program.buffer(heads.num_heads * heads.padded_size)
        self.mixed = program.buffer(heads.num_heads * heads.size)
        self.inner: dict[tuple[int, int], Buffer] = {}
        self.gates = program.buffer(1)
        program.embed(self.embedding, self.states, self.kind)
        self.first_ops: list[int] = []  # of each layer, then of the head
        for index, layer in enumerate(model.model.layers):
            self.first_ops.append(len(program.ops))
            self.add_layer(layer, index, config)
        self.first_ops.append(len(program.ops))
        self.final_norm = self.norm(model.model.norm)
        self.num_outputs = len(model.lm_head.weight)
        head = pack(program.arena, [model.lm_head.weight])
        bias = program.arena.keep_vector(model.lm_head.bias)
        program.linear(self.states, head, None, norm=self.final_norm, bias=bias)
        if model.lm_head.weight is not model.model.embed_tokens.weight:
            model.lm_head = nn.Identity()
        model.model.layers, model.model.norm = nn.ModuleList(), nn.Identity()
        self.machine = Machine(program)
        self.taps: tuple[int, ...] = ()
        self.has_head = True
        self.num_fed = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        weight = moved(self.final_norm.weight, self.program.moves)
        self.final_norm = Norm(weight, self.final_norm.epsilon)
        self.arrange()

    @property
    def loads(self) -> np.ndarray:
        """Tokens of each expert in the last forward, int32 [mixtures, E]."""
        return self.machine.loads if self.num_fed else np.zeros((0, 0), np.int32)

    @property
    def chosen(self) -> np.ndarray:
        """The experts each token of the last forward visited, int32 [mixtures, N, K]."""
        program = self.program
        shape = (program.num_mixtures, self.num_fed, program.per_token)
        return self.machine.chosen[: np.prod(shape)].reshape(shape)

    def norm(self, module: Any) -> Norm:
        """A transformers RMS norm as programs take it."""
        return Norm(self.program.arena.keep_vector(module.weight), module.variance_epsilon)

    def add_layer(self, layer: Any, index: int, config: Any) -> None:
        """Add a decoder layer's operations."""
        program, arena, attention = self.program, self.program.arena, layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weight = pack(arena, [torch.cat([each.weight.detach() for each in projections])])
        biases = [each.bias for each in projections if each.bias is not None]
        bias = arena.keep_vector(torch.cat(biases) if biases else None)
        norm = self.norm(layer.input_layernorm)
        program.linear(self.states, weight, self.raw, norm=norm, bias=bias)
        program.rotate(
            self.raw, self.queries, self.heads, index, self.kind, **self.norms(attention)
        )
        types = getattr(config, "layer_types", None)
        is_sliding = not types or types[index] == "sliding_attention"
        program.attend(
            self.queries,
            self.mixed,
            self.heads,
            index,
            self.kind,
            scale=attention.scaling,
            sliding=(getattr(config, "sliding_window", None) or 0) if is_sliding else 0,
        )
        output = pack(arena, [attention.o_proj.weight])
        bias = arena.keep_vector(attention.o_proj.bias)
        program.linear(self.mixed, output, self.states, bias=bias, epilogue=Epilogue.ADD)
        norm = self.norm(layer.post_attention_layernorm)
        if hasattr(layer.mlp, "experts"):
            self.add_mixture(layer.mlp, norm)
        else:
            self.add_dense(layer.mlp, norm)

    def norms(self, attention: Any) -> dict[str, Any]:
        """What stands between projection and rotation: per head (Qwen3), or over all (OLMoE)."""
        if not hasattr(attention, "q_norm"):
            return {}
        norms = self.norm(attention.q_norm), self.norm(attention.k_norm)
        if len(attention.q_norm.weight) == self.heads.size:
            return {"head_norms": norms}
        return {"wide_norms": norms, "clip": getattr(attention.config, "clip_qkv", None) or 0.0}

    def hidden(self, size: int, rows_per_token: int = 1) -> Buffer:
        """The buffer of a feed-forward block's inner states; blocks of one size share it."""
        key = (size, rows_per_token)
        if key not in self.inner:
            self.inner[key] = self.program.buffer(size, rows_per_token)
        return self.inner[key]

    def add_dense(self, mlp: Any, norm: Norm) -> None:
        """Add a gated feed-forward block."""
        inner = self.add_gate_up(mlp, norm)
        self.add_down(mlp, inner)

    def add_gate_up(self, mlp: Any, norm: Norm) -> Buffer:
        """Add the first half of a gated feed-forward block; returns its inner states."""
        program, arena = self.program, self.program.arena
        both = [mlp.gate_proj.weight, mlp.up_proj.weight]
        weight = pack(arena, both, alternate=True)
        biases = [mlp.gate_proj.bias, mlp.up_proj.bias]
        bias = 0 if biases[0] is None else arena.keep_vector(alternate_blocks(biases))
        inner = self.hidden(len(both[0]))
        program.linear(self.states, weight, inner, norm=norm, bias=bias, epilogue=Epilogue.GATE)
        return inner

    def add_down(self, mlp: Any, inner: Buffer, scale: Buffer | None = None) -> None:
        """Add the second half, scaled by a gate where there is one."""
        arena = self.program.arena
        down = pack(arena, [mlp.down_proj.weight])
        bias = arena.keep_vector(mlp.down_proj.bias)
        self.program.linear(inner, down, self.states, bias=bias, epilogue=Epilogue.ADD, scale=scale)

    def add_mixture(self, block: Any, norm: Norm) -> None:
        """Add a mixture of experts, and the gated expert that all tokens share (Qwen2-MoE)."""
        shared = getattr(block, "shared_expert", None)
        inner = self.hidden(block.experts.down_proj.shape[-1], block.gate.top_k)
        if shared is None:
            add_experts(self.program, block, self.states, inner, norm)
            return
        shared_inner = self.add_gate_up(shared, norm)  # before the states are added to
        add_experts(self.program, block, self.states, inner, norm, self.gates)
        self.add_down(shared, shared_inner, self.gates)

    def set_taps(self, taps: tuple[int, ...]) -> None:
        """Keep the states in front of these layers as features; of the last, the normed ones."""
        self.taps = taps
        self.arrange()

    def arrange(self) -> None:
        """Put the operations of a forward in order: with taps, with or without the head."""
        program, size = self.program, self.states.width
        ops = list(program.ops[: len(program.ops) if self.has_head else -1])
        for place in reversed(range(len(self.taps))):
            tap = self.taps[place]
            extra = Program()
            extra.move(
                Op.KEEP,
                source=self.states.index,
                size=size,
                kind=self.kind,
                column=place * size,
                width=len(self.taps) * size,
                norm=self.final_norm if tap + 1 == len(self.first_ops) else None,
            )
            ops[self.first_ops[tap] : self.first_ops[tap]] = extra.ops
        self.machine.set_ops(ops)

    def forward(
        self,
        cache: MaskedKVCache,
        fed: Sequence[Sequence[int]],
        out: torch.Tensor | None,
        *,
        last_only: bool = False,
    ) -> None:
        """Feed each row its tokens, behind what it holds; the caller then advances the cache.

        Args:
            cache: Has room for the longest row (``make_room``).
            fed: Token ids of each row.
            out: Gets the tokens' logits, float32 [B, T, V], with ``last_only`` [B, 1, V] of each
                row's last token; None spares the head.
        """
        machine = self.prepare(cache, sum(map(len, fed)), has_head=out is not None)
        firsts = fill_tokens(machine.tokens, cache, fed)
        num_wanted = 0
        if out is not None:
            num_wanted = want(machine.wanted, firsts, fed, out, last_only=last_only)
        self.run(cache, self.num_fed, num_wanted)

    def look(
        self,
        cache: MaskedKVCache,
        tokens: Sequence[int],
        positions: np.ndarray,
        visible: np.ndarray,
    ) -> None:
        """Run tokens that see what a mask says, behind the slots in use; leaves no trace.

        Args:
            cache: Of one row.
            tokens: Token ids.
            positions: Their positions, [N].
            visible: bool [N, slots in use + N].
        """
        count = len(tokens)
        table = self.prepare(cache, count, has_head=False).tokens[:count]
        table[:] = 0
        table[:, Token.ID], table[:, Token.POSITION] = tokens, positions
        table[:, Token.SLOT] = cache.num_used + np.arange(count)
        mask = np.zeros((count, cache.num_slots), dtype=np.uint8)
        mask[:, : visible.shape[1]] = visible
        self.run(cache, count, 0, mask.ctypes.data)

    def prepare(self, cache: MaskedKVCache, num_tokens: int, *, has_head: bool) -> Machine:
        """Have memory, operations and rotary factors for a forward."""
        self.num_fed = num_tokens
        if has_head != self.has_head:
            self.has_head = has_head
            self.arrange()
        if cache.num_slots > len(self.table):
            self.table = make_table(self.rotary, 1 << (cache.num_slots - 1).bit_length())
        self.machine.make_room(num_tokens, cache.num_slots, thread_count(self.program))
        return self.machine

    def run(self, cache: MaskedKVCache, num_tokens: int, num_wanted: int, mask: int = 0) -> None:
        """Run what is prepared."""
        if self.taps and cache.features_BSF is None:
            like = self.embedding.new_empty(0)
            shape = (cache.num_sequences, cache.num_slots, len(self.taps) * self.states.width)
            cache.features_BSF = allocate(cache.name, "features", like, shape)
        given = Given(
            num_slots=cache.num_slots,
            caches=cache_addresses(cache, self.heads, self.embedding.dtype).ctypes.data,
            valid=cache.valid_BS.data_ptr(),
            rotary=self.table.ctypes.data,
            features=0 if cache.features_BSF is None else cache.features_BSF.data_ptr(),
            mask=mask,
        )
        self.machine.run(num_tokens, num_wanted, given)


def add_experts(
    program: Program,
    block: Any,
    states: Buffer,
    inner: Buffer,
    norm: Norm | None,
    gates: Buffer | None = None,
) -> None:
    """Add the routed experts of a transformers block; its weights are let go.

    Args:
        program: Gets the operations.
        block: The mixture.
        states: Read and added to.
        inner: The experts' inner states.
        norm: In front of router and experts.
        gates: Gets the logit of the shared expert's gate, where there is one.
    """
    arena, experts = program.arena, block.experts
    rows = [block.gate.weight.detach()]
    if gates is not None:
        rows.append(block.shared_expert_gate.weight.detach())
    router = pack(arena, [torch.cat(rows)])
    gate_up, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    arena.reserve((gate_up.numel() + down.numel()) * gate_up.element_size())
    program.experts(
        states,
        inner,
        norm,
        router,
        [pack(arena, list(each.chunk(2)), alternate=True) for each in gate_up],
        [pack(arena, [each]) for each in down],
        per_token=block.gate.top_k,
        is_normalized=getattr(block.gate, "norm_topk_prob", True),  # Mixtral's always are
        gates=gates,
    )
    experts.gate_up_proj = experts.down_proj = None


class CompiledMixture:
    """The router and the routed experts of one transformers block, which is taken over."""

    def __init__(self, block: Any):
        self.program = program = Program()
        self.states = program.buffer(block.gate.weight.shape[1])
        inner = program.buffer(block.experts.down_proj.shape[-1], block.gate.top_k)
        add_experts(program, block, self.states, inner, None)
        self.machine = Machine(program)

    def __call__(self, rows_NH: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """The experts' output added to the rows, float32 [N, H]; the router chooses anew."""
        states = rows_NH.float().contiguous().clone()
        self.machine.make_room(len(states), 1, thread_count(self.program))
        self.machine.table[self.states.index] = states.data_ptr(), 4 * states.shape[1]
        self.machine.run(len(states), 0, Given())
        return states


def cache_addresses(cache: MaskedKVCache, heads: Heads, dtype: torch.dtype) -> np.ndarray:
    """Addresses of each layer's keys and values, int64 [layers, 2]; makes the buffers first.

    They are kept with the cache; a copy of a cache finds that they are not its own.
    """
    first = cache.buffers[0]
    if not first.is_initialized:
        shape = (cache.num_sequences, heads.num_kv_heads, 0, heads.padded_size)
        like = torch.empty(shape, dtype=dtype)
        for layer in cache.buffers:
            layer.lazy_initialization(like, like)
    if cache.addresses is None or cache.addresses[0, 0] != first.states()[0].data_ptr():
        pointers = [[each.data_ptr() for each in layer.states()] for layer in cache.buffers]
        cache.addresses = np.array(pointers, dtype=np.int64)
    return cache.addresses


def fill_tokens(table: np.ndarray, cache: MaskedKVCache, fed: Sequence[Sequence[int]]) -> list[int]:
    """Write down each token's id, row, slot and position; returns each row's first token."""
    firsts, index = [], 0
    for row, tokens in enumerate(fed):
        held = cache.num_valid(row)
        start = held if cache.aligned else cache.num_used
        firsts.append(index)
        if len(tokens) == 1:
            table[index] = (tokens[0], row, start, held, start, 0)
        elif tokens:
            part = table[index : index + len(tokens)]
            part[:, Token.ID] = tokens
            part[:, Token.ROW] = row
            part[:, Token.START] = start
            steps = np.arange(len(tokens))
            part[:, Token.SLOT] = start + steps
            part[:, Token.POSITION] = held + steps
        index += len(tokens)
    return firsts


def want(
    table: np.ndarray,
    firsts: Sequence[int],
    fed: Sequence[Sequence[int]],
    out: torch.Tensor,
    *,
    last_only: bool,
) -> int:
    """Write down whose outputs are wanted and where they go; returns how many.

    Args:
        table: Gets the tokens, then the addresses.
        firsts: Each row's first token.
        fed: Token ids of each row.
        out: float32 [B, T, V], or [B, 1, V] for each row's last token alone.
        last_only: Which of the two.
    """
    tokens, places = [], []
    start, row_bytes, step_bytes = out.data_ptr(), 4 * out.stride(0), 4 * out.stride(1)
    for row, (first, given) in enumerate(zip(firsts, fed, strict=True)):
        count = len(given)
        for step in range(count - 1 if last_only else 0, count) if count else ():
            tokens.append(first + step)
            places.append(start + row_bytes * row + (0 if last_only else step_bytes * step))
    table[: len(tokens)] = tokens
    table[len(tokens) : 2 * len(tokens)] = places
    return len(tokens)


def alternate_blocks(biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """Two biases in the order of weights whose blocks take turns."""
    return torch.stack([bias.detach().view(-1, 16) for bias in biases], dim=1).reshape(-1)
