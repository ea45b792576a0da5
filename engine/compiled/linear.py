"""A single linear layer as a program.

Legend: N rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch

from specgym.engine.compiled.packing import pack
from specgym.engine.compiled.program import Given, Machine, Program, thread_count


class CompiledLinear:
    """``rows @ weight.T + bias`` in float32; each row's bits are its own.

    Args:
        weight: [O, I], I even.
        bias: [O], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.program = program = Program()
        self.num_outputs = len(weight)
        self.rows = program.buffer(0)
        self.out = program.buffer(0)
        packed = pack(program.arena, [weight])
        program.linear(self.rows, packed, self.out, bias=program.arena.keep_vector(bias))
        self.machine = Machine(program)

    def __call__(self, rows_NI: torch.Tensor) -> torch.Tensor:
        """Outputs float32 [N, O] of contiguous rows, float32 [N, I]."""
        out = torch.empty(len(rows_NI), self.num_outputs)
        if len(rows_NI) == 0:
            return out
        machine = self.machine
        machine.make_room(len(rows_NI), 1, thread_count(self.program))
        machine.table[self.rows.index] = rows_NI.data_ptr(), 4 * rows_NI.shape[1]
        machine.table[self.out.index] = out.data_ptr(), 4 * self.num_outputs
        machine.run(len(rows_NI), 0, Given())
        return out
