"""The decoder computes what transformers computes, weights and gradients alike."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from small_models import MODELS, SIZES, in_float64, model_of
from states import from_hf, to_hf
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

from phalanx.checkpoint.weights import sizes_of
from phalanx.comm.comm import Ranks
from phalanx.config import OptimizerConfig
from phalanx.errors import CheckpointError, ConfigError
from phalanx.hugging_face.config import config_to_hf, shape_from_hf
from phalanx.hugging_face.families import family_of
from phalanx.hugging_face.names import table
from phalanx.launch.local import run_ranks
from phalanx.models.decoder import Decoder
from phalanx.models.loss import IGNORE
from phalanx.models.registry import PRESETS, shape_of
from phalanx.models.shape import ModelShape, Yarn
from phalanx.parallel import data
from phalanx.parallel.accumulate import Accumulate
from phalanx.train.optimizer import build_optimizer
from phalanx.train.step import Step

TOLERANCE = 1e-12


def pair(name: str) -> tuple[PreTrainedModel, Decoder]:
    """Make both models in fp64 with equal weights, no norm weight and no bias left at 1 or 0."""
    small = model_of(name)
    with in_float64():  # tables of angles are made with the model
        theirs: PreTrainedModel = type(small)(small.config).double()
    theirs.load_state_dict(small.state_dict())
    theirs.set_experts_implementation("eager")  # the default has no float64
    shape = shape_from_hf(theirs.config.to_dict())
    ours = Decoder(shape).double()
    ours.load_state_dict(from_hf(theirs.state_dict(), shape, theirs.config.model_type))
    return theirs.eval(), ours


def sample() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, 97, (2, 24), generator=generator)
    labels_BT = torch.randint(0, 97, (2, 24), generator=generator)
    labels_BT[0, :5] = IGNORE
    return tokens_BT, labels_BT


@pytest.mark.parametrize("name", MODELS)
def test_equal_logits_loss_and_gradients(name: str) -> None:
    theirs, ours = pair(name)
    tokens_BT, labels_BT = sample()
    with in_float64():
        expected_BTV = theirs(tokens_BT).logits
    torch.testing.assert_close(ours(tokens_BT), expected_BTV, rtol=TOLERANCE, atol=TOLERANCE)

    expected = F.cross_entropy(
        expected_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum", ignore_index=IGNORE
    )
    expected.backward()
    loss = ours(tokens_BT, labels_BT)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0.0)
    # The gradients have the layout of their weights, so the same conversion carries them.
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    biases = [each for each in theirs.named_buffers() if each[0].endswith("correction_bias")]
    gradients |= {name: torch.zeros_like(bias) for name, bias in biases}
    expected_gradients = from_hf(gradients, ours.shape, theirs.config.model_type)
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    found |= {name: torch.zeros_like(buffer) for name, buffer in ours.named_buffers()}
    assert found.keys() == expected_gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for key, gradient in found.items():
        # The bias of GPT-2's keys has no gradient but rounding errors.
        scale = expected_gradients[key].abs().max().clamp(min=1e-5 * largest)
        torch.testing.assert_close(
            gradient / scale, expected_gradients[key] / scale, rtol=0.0, atol=10 * TOLERANCE
        )


class NextRow:
    """Cross-entropy, summed; a microbatch is tokens and labels."""

    def loss_sum(self, model: nn.Module, microbatch: tuple[Tensor, Tensor], step: int) -> Tensor:
        return model(*microbatch)

    def num_valid(self, microbatch: tuple[Tensor, Tensor]) -> int:
        return microbatch[1].numel()


def loss_and_gradients(
    shape: ModelShape, weights: dict[str, Tensor], tokens_BT: Tensor, labels_BT: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Compute both over this rank's rows, each a microbatch."""
    comm = Ranks({"dp": 2})
    model = Decoder(shape).double()
    model.load_state_dict(weights)
    config = OptimizerConfig()
    run = Accumulate(data.apply(model, comm))
    step = Step(
        model, build_optimizer(model, config), NextRow(), config, comm=comm, num_steps=1, run=run
    )
    own = [rows[comm.coord("dp") :: 2].split(1) for rows in (tokens_BT, labels_BT)]
    loss, _ = step.compute_gradients(list(zip(*own, strict=True)))
    return float(loss), {n: cast(Tensor, p.grad) for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-tied-first-dense", "olmoe"])
def test_a_step_with_the_balancing_loss_of_a_config(name: str) -> None:
    """Over the global batch, on two ranks with two microbatches each."""
    theirs, ours = pair(name)
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    shape = shape_from_hf(theirs.config.to_dict() | changes)
    draw = torch.Generator().manual_seed(1)
    tokens_BT, labels_BT = torch.randint(0, 97, (2, 4, 12), generator=draw).unbind()
    with in_float64():
        found: Any = theirs(tokens_BT, output_router_logits=True)
        expected = F.cross_entropy(found.logits.flatten(0, 1), labels_BT.flatten())
        balance = 0.1 * found.aux_loss
        (expected + balance).backward()
    assert 0.1 < balance.detach() < 1
    gradients = from_hf(
        {name: cast(Tensor, p.grad) for name, p in theirs.named_parameters()},
        shape, theirs.config.model_type,
    )  # fmt: skip
    given = shape, ours.state_dict(), tokens_BT, labels_BT
    for loss, own in run_ranks(loss_and_gradients, 2, *given, threads=1):
        assert loss == pytest.approx(float((expected + balance).detach()), rel=1e-12)
        for key, gradient in gradients.items():
            torch.testing.assert_close(own[key], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_back_to_hugging_face(name: str) -> None:
    theirs, ours = pair(name)
    back = to_hf(ours.state_dict(), ours.shape, theirs.config.model_type)
    state = theirs.state_dict()
    if ours.shape.tied:
        del state["lm_head.weight"]
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_bare_gpt2_checkpoint_with_its_old_buffers() -> None:
    theirs, ours = pair("gpt2")
    bare = {**theirs.transformer.state_dict(), "h.0.attn.bias": torch.ones(1, 1, 64, 64)}
    taken = from_hf(bare, ours.shape, "gpt2")
    assert all(torch.equal(taken[key], value) for key, value in ours.state_dict().items())


def test_a_head_that_is_missing_names_the_setting_of_a_tied_one() -> None:
    theirs, ours = pair("llama")
    state = theirs.state_dict()
    del state["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' is missing; .*to true in config"):
        from_hf(state, ours.shape, "llama")


def test_published_configs_give_the_presets() -> None:
    llama3_8b = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    mixtral_8x7b = {
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "output_router_logits": True,  # False as published: then the loss is not computed
        "router_aux_loss_coef": 0.02,
        "tie_word_embeddings": False,
    }
    qwen3_30b_a3b = {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "max_window_layers": 48,
        "sliding_window": None,
        "use_sliding_window": False,
        "output_router_logits": True,  # as above
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    }
    assert shape_from_hf(llama3_8b) == shape_of("llama3-8b")
    assert shape_from_hf(mixtral_8x7b) == shape_of("mixtral-8x7b")
    assert shape_from_hf(qwen3_30b_a3b) == shape_of("qwen3-30b-a3b")
    assert shape_from_hf(GPT2Config().to_dict()) == shape_of("gpt2-124m")


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_that_was_written_gives_the_shape_again(name: str) -> None:
    shape = shape_of(name)
    if shape.experts is not None:  # no config.json has these
        shape = replace(shape, experts=replace(shape.experts, bias_rate=0.0, z_loss=0.0))
    assert shape_from_hf(json.loads(json.dumps(config_to_hf(shape, "float32")))) == shape


def test_an_old_gemma_without_layer_types_has_the_windows_of_a_new_one() -> None:
    shape = shape_of("gemma3-270m")
    config = config_to_hf(shape, "float32")
    kinds = config.pop("layer_types")
    assert kinds[:6] == ["sliding_attention"] * 5 + ["full_attention"]
    assert shape_from_hf(config) == shape
    del config["sliding_window_pattern"]
    assert shape_from_hf(config) == shape


@pytest.mark.parametrize(
    "name",
    [
        *("llama3-1b", "llama3-8b", "qwen3-0.6b", "qwen3-8b", "gpt2-124m", "mistral-7b"),
        *("qwen2.5-0.5b", "qwen2.5-7b", "olmo2-1b", "gemma3-270m"),
        *("mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b"),
    ],
)
def test_transformers_makes_the_same_tensors_of_a_config(name: str) -> None:
    shape = dataclasses.replace(shape_of(name), num_layers=1)
    with torch.device("meta"):
        config = AutoConfig.for_model(**config_to_hf(shape, "float32"))
        model = AutoModelForCausalLM.from_config(config)
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == {
        link.theirs: link.join_sizes(sizes_of(shape))
        for link in table(shape, family_of(shape), is_stacked=True)
    }


@pytest.mark.parametrize("name", MODELS)
def test_one_tensor_at_a_time_is_the_whole(name: str) -> None:
    theirs, ours = pair(name)
    state, weights = theirs.state_dict(), ours.state_dict()
    links = table(ours.shape, theirs.config.model_type, is_stacked=True)
    for link in links:
        parts = link.split(state[link.theirs])
        assert all(torch.equal(weights[n], p) for n, p in zip(link.ours, parts, strict=True))
        assert torch.equal(link.join([weights[n] for n in link.ours]), state[link.theirs])
        assert link.join_sizes(sizes_of(ours.shape)) == state[link.theirs].shape
    assert sorted(n for link in links for n in link.ours) == sorted(weights)


def test_yarn_is_read_as_released_files_declare_it() -> None:
    deepseek = {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    }  # fmt: skip
    qwen = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    by_heads = Yarn(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
    for name, scaling, expected in (
        ("deepseek-v3", deepseek, by_heads),
        ("qwen3", qwen, Yarn(factor=4.0, original_length=32768)),
        ("qwen3", {"type": "yarn", "factor": 4}, Yarn(factor=4.0, original_length=128)),
    ):
        config = {**model_of(name).config.to_dict(), "rope_theta": 1e4, "rope_scaling": scaling}
        del config["rope_parameters"]
        assert shape_from_hf(config).rope_scaling == expected
    assert by_heads.rotation_scale == 1.0
    assert by_heads.score_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2)


def test_unknown_configs_are_refused() -> None:
    # A config under a near type's name may load and mean another model: none is suggested.
    with pytest.raises(
        ConfigError, match=r"model_type is 'lama'; legal are llama, mistral, qwen2, "
    ):
        shape_from_hf({"model_type": "lama"})
    with pytest.raises(ConfigError, match="rope_type is 'dynamic'"):
        dynamic = {"rope_type": "dynamic"}
        shape_from_hf({**LlamaConfig(**SIZES).to_dict(), "rope_parameters": dynamic})
    with pytest.raises(ConfigError, match="mlp_bias is True"):
        shape_from_hf(LlamaConfig(**SIZES, mlp_bias=True).to_dict())
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0\.5; only 1\.0"):
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        shape_from_hf({**LlamaConfig(**SIZES).to_dict(), "rope_parameters": rope})
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        shape_from_hf({"model_type": "llama", "num_attention_heads": 4})


def test_weights_that_do_not_fit_are_refused() -> None:
    theirs, ours = pair("llama")
    state = dict(theirs.state_dict())
    with pytest.raises(
        CheckpointError, match=r"the model has no 'surplus\.weight', the first of 1"
    ):
        from_hf({**state, "surplus.weight": torch.ones(1)}, ours.shape, "llama")
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight' has shape \(96, 32\)"):
        from_hf({**state, "model.embed_tokens.weight": torch.ones(96, 32)}, ours.shape, "llama")
    del state["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is missing"):
        from_hf(state, ours.shape, "llama")
