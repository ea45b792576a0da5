"""How forwards are captured on CUDA, against a scripted ``torch.cuda``; and who gets captures."""

import contextlib
import logging

import pytest
import torch
import transformers

from specgym.engine.forward.capture import CudaCapture, accelerate
from specgym.engine.forward.graphs import GraphRunner
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.testing import tiny_llama


class FakeCuda:
    """What ``CudaCapture`` uses of ``torch.cuda``; the capture runs the forward, a replay counts.

    Attributes:
        log: What was done, in order.
    """

    def __init__(self, monkeypatch):
        self.log, self.mode = [], "default"
        for name in ("device", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "Stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set_mode)

    def set_mode(self, mode):
        self.mode = mode

    def wait_stream(self, stream):
        self.log.append("wait")

    def replay(self):
        self.log.append("replay")

    @contextlib.contextmanager
    def device(self, device):
        yield

    stream = device

    @contextlib.contextmanager
    def graph(self, graph, pool):
        assert graph is self
        self.log.append(f"capture into {pool}")
        yield


def test_a_forward_warms_up_is_captured_and_replayed_on_its_own_inputs(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    seen = []

    def forward(inputs):
        seen.append((inputs["x"].data_ptr(), cuda.mode))
        cuda.log.append("forward")
        return {"y": inputs["x"] * 2}

    x = torch.ones(3)
    replay = CudaCapture(torch.device("cuda"))(forward, {"x": x})
    assert cuda.log == [
        "wait",
        "forward",
        "forward",
        "wait",
        "capture into pool",
        "forward",
        "synchronize",
    ]
    assert [mode for _, mode in seen] == ["default", "error", "default"]
    assert len({pointer for pointer, _ in seen}) == 1
    assert seen[0][0] != x.data_ptr()
    outputs = replay({"x": torch.full((3,), 5.0)})
    assert cuda.log[-1] == "replay"
    assert len(seen) == 3
    assert replay({"x": x})["y"] is outputs["y"]


def test_a_forward_that_waits_is_refused_and_the_mode_is_put_back(monkeypatch):
    cuda = FakeCuda(monkeypatch)

    def forward(inputs):
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return inputs

    with pytest.raises(RuntimeError, match="synchronizing"):
        CudaCapture(torch.device("cuda"))(forward, {"x": torch.ones(3)})
    assert cuda.mode == "default"
    assert "capture into pool" not in cuda.log


def test_on_cuda_models_share_one_memory_pool_and_the_rest_says_why_not(monkeypatch, caplog):
    FakeCuda(monkeypatch)
    members = [
        ModelMember(name, tiny_llama(seed), compiled=False)
        for seed, name in enumerate(("draft", "target"))
    ]
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters=longrope,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    members.append(ModelMember("long", model, compiled=False))
    for member in members:
        member.device = torch.device("cuda", 0)
    with caplog.at_level(logging.WARNING, logger="specgym"):
        accelerate([NGramMember(), *members])
    assert isinstance(members[0].graphs, GraphRunner)
    assert members[0].graphs.capture is members[1].graphs.capture
    assert members[2].graphs is None
    ours = [record for record in caplog.records if record.name.startswith("specgym")]
    assert [record.getMessage() for record in ours] == [
        "member 'long' runs eagerly: its rotary factors are chosen per request"
    ]


def test_graphs_can_be_turned_off(monkeypatch):
    FakeCuda(monkeypatch)
    member = ModelMember("target", tiny_llama(0), compiled=False)
    member.device = torch.device("cuda", 0)
    accelerate([member], graphs=False)
    assert member.graphs is None
