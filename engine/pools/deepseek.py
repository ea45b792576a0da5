"""DeepSeek-MoE 16B, whose checkpoint asks for remote code, built from parts of transformers.

Its decoder (full multi-head attention, a dense first layer, then shared and routed experts under a
softmax router) is the decoder of DeepSeek-OCR 2, which transformers has; so is every weight's name.
Here it gets its language-model head and its published configuration, and no remote code runs. The
router is kept in float32, where the published code rounds it to the weights' type.

Source: Dai et al. 2024, DeepSeekMoE (arXiv 2401.06066).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, GenerationMixin
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import (
    DeepseekOcr2TextModel,
    DeepseekOcr2TextPreTrainedModel,
)

MODEL_TYPE = "deepseek"
EXPERT_LAYOUT = "qwen2_moe"  # one matrix per expert in the file, stacked when it is loaded


class DeepseekConfig(DeepseekOcr2TextConfig):
    """The published configuration; every layer from ``first_k_dense_replace`` on has experts.

    Raises:
        ValueError: If it asks for what the 16B checkpoints do not have.
    """

    model_type = MODEL_TYPE

    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"

    def __post_init__(self, **kwargs: Any) -> None:
        """Derives what the decoder wants to know, and refuses what it would get wrong."""
        for name, value in (("moe_layer_freq", 1), ("norm_topk_prob", False)):
            if getattr(self, name) != value:
                raise ValueError(f"{name}: must be {value}; got {getattr(self, name)}")
        if self.scoring_func != "softmax":
            raise ValueError(f"scoring_func: must be 'softmax'; got {self.scoring_func!r}")
        if self.mlp_layer_types is None:
            num_dense = min(self.first_k_dense_replace, self.num_hidden_layers)
            num_sparse = self.num_hidden_layers - num_dense
            self.mlp_layer_types = ["dense"] * num_dense + ["sparse"] * num_sparse
        super().__post_init__(**kwargs)


class DeepseekForCausalLM(DeepseekOcr2TextPreTrainedModel, GenerationMixin):
    """The decoder and its vocabulary head.

    Args:
        config: Its configuration.
    """

    config_class = DeepseekConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DeepseekConfig):
        super().__init__(config)
        self.model = DeepseekOcr2TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """True: transformers looks for its decorator in the file of the class, which is ours."""
        return True

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> MoeCausalLMOutputWithPast:
        """Logits [B, T, V] of the last ``logits_to_keep`` tokens; of all where that is 0.

        ``return_dict`` must be there for transformers' own decoding, and must be true.
        """
        assert return_dict
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        return MoeCausalLMOutputWithPast(
            logits=self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:]),
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
        )


AutoConfig.register(MODEL_TYPE, DeepseekConfig, exist_ok=True)
AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM, exist_ok=True)
register_checkpoint_conversion_mapping(
    MODEL_TYPE, get_checkpoint_conversion_mapping(EXPERT_LAYOUT), overwrite=True
)
