"""Configurations: both spellings, documented defaults, and one clear line for everything wrong."""

import math
import resource

import pytest

from checkpoints import FP8, T_CPU, T_WIDE
from minidsa.model.config import parse_config
from minidsa.model.keys import ConfigError

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V32 = {"model_type": "deepseek_v32", "rope_theta": 10000, "rope_scaling": YARN}
KIMI = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "rope_theta": 50000,
    "rope_scaling": YARN | {"factor": 32, "beta_fast": 1.0},
    "eos_token_id": 163586,
}


def changed(**fields):
    return dict(T_CPU) | fields


def test_published_sizes_come_from_documented_defaults():
    config = parse_config(V32)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (129280, 7168, 61)
    assert sum(config.dense_layers) == 3
    assert config.indexer and (config.indexer.num_heads, config.indexer.topk) == (64, 2048)
    assert config.moe and (config.moe.num_experts, config.moe.num_groups) == (256, 8)
    assert config.max_position_embeddings == 163840
    assert config.eos_token_ids == (1,)
    assert parse_config(V32 | {"model_type": "deepseek_v3"}).indexer is None


@pytest.mark.parametrize(
    ("raw", "scale"),
    [
        (V32, 0.135234),
        (KIMI, 0.130861),
        (KIMI | {"rope_scaling": YARN | {"factor": 64}}, 0.144680),
        (V32 | {"rope_scaling": None}, 192**-0.5),
    ],
)
def test_softmax_scale(raw, scale):
    assert parse_config(raw).softmax_scale == pytest.approx(scale, rel=1e-5)


def test_both_spellings_of_rope_mean_the_same():
    old = parse_config(V32)
    parameters = YARN | {"rope_type": "yarn", "rope_theta": 10000}
    del parameters["type"]
    new = {"model_type": "deepseek_v32", "rope_parameters": parameters}
    assert parse_config(new).rope == old.rope
    plain = parse_config(changed())
    assert plain.rope.yarn is None
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    assert parse_config(changed(rope_parameters=parameters)).rope == plain.rope


def test_yarn_rotation_scale_follows_attention_factor_and_mscale():
    def rotation(**fields):
        rope = parse_config(changed(rope_scaling=YARN | fields)).rope
        assert rope.yarn is not None
        return rope.yarn.rotation_scale

    log = math.log(40)
    assert rotation() == 1.0
    assert rotation(attention_factor=1.5) == 1.5
    assert rotation(mscale=0.7) == pytest.approx((0.07 * log + 1) / (0.1 * log + 1))
    assert rotation(mscale=None) == pytest.approx(0.1 * log + 1)
    assert rotation(mscale=0.7, mscale_all_dim=0) == pytest.approx(0.1 * log + 1)


def test_theta_is_never_guessed():
    raw = changed()
    del raw["rope_theta"]
    with pytest.raises(ConfigError, match="rope_theta is missing"):
        parse_config(raw)
    with pytest.raises(ConfigError, match=r"rope_theta.*disagree"):
        parse_config(changed(rope_parameters={"rope_type": "default", "rope_theta": 5.0}))


@pytest.mark.parametrize("key", sorted(set(KIMI) - {"model_type", "rope_scaling", "eos_token_id"}))
def test_a_missing_key_without_default_is_named(key):
    raw = {k: v for k, v in KIMI.items() if k != key}
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        parse_config(raw)


def test_kimi_k2_is_parsed_as_deepseek_v3():
    config = parse_config(KIMI)
    assert config.indexer is None
    assert config.moe and config.moe.num_experts == 384
    assert config.num_mtp_layers == 0


def test_model_types_are_refused_by_name():
    for raw in ({}, {"model_type": "llama"}, {"model_type": None}, {"model_type": ["x"]}):
        with pytest.raises(ConfigError, match=r"model_type.*deepseek_v32, deepseek_v3, kimi_k2"):
            parse_config(raw)
    with pytest.raises(ConfigError, match=r"kimi_k25.*text_config"):
        parse_config({"model_type": "kimi_k25", "text_config": KIMI})


def test_eos_ids_of_every_spelling():
    assert parse_config(changed(eos_token_id=[3, 5])).eos_token_ids == (3, 5)
    assert parse_config(changed(eos_token_id=None)).eos_token_ids == ()
    assert parse_config(changed(), {"eos_token_id": [7]}).eos_token_ids == (7,)
    assert parse_config(changed(), {"temperature": 1.0}).eos_token_ids == (1,)
    for wrong in (512, -1, "1", [1, 512], True):
        with pytest.raises(ConfigError, match="eos_token_id"):
            parse_config(changed(eos_token_id=wrong))
        with pytest.raises(ConfigError, match=r"generation_config.*eos_token_id"):
            parse_config(changed(), {"eos_token_id": wrong})


def test_layers_are_dense_by_list_or_by_number():
    assert parse_config(changed()).dense_layers == (True, False, False, False)
    kinds = ["sparse", "dense", "dense", "sparse"]
    config = parse_config(changed(mlp_layer_types=kinds))
    assert config.dense_layers == (False, True, True, False)
    assert parse_config(changed(first_k_dense_replace=4)).moe is None
    for wrong in (kinds[:3], [*kinds[:3], "moe"], "dense"):
        with pytest.raises(ConfigError, match="mlp_layer_types"):
            parse_config(changed(mlp_layer_types=wrong))


def test_fp8_blocks_are_the_only_quantisation():
    assert parse_config(T_WIDE).quantised
    assert parse_config(changed(quantization_config=dict(FP8) | {"scale_fmt": "ue8m0"})).quantised
    for key, value in (
        ("quant_method", "compressed-tensors"),
        ("fmt", "e5m2"),
        ("weight_block_size", [64, 64]),
        ("activation_scheme", "static"),
    ):
        with pytest.raises(ConfigError, match=rf"quantization_config\.{key}"):
            parse_config(changed(quantization_config=dict(FP8) | {key: value}))


def test_cache_layout():
    layout = parse_config(T_CPU).cache_layout()
    assert (layout.latent_width, layout.index_width) == (40, 16)
    assert layout.index_layers == (True,) * 4
    dense = parse_config(changed(model_type="deepseek_v3")).cache_layout()
    assert dense.index_layers == (False,) * 4
    assert dense.elements_per_token == 160


WRONG = {
    "num_hidden_layers": [10**9, 0, -1, 4.0, "4", None, True],
    "vocab_size": [-1, 0, 10**12, 512.5],
    "hidden_size": [0, 10**9],
    "num_attention_heads": [0, -4],
    "num_key_value_heads": [3, 1],
    "q_lora_rank": [-8, 23, "24", None],
    "kv_lora_rank": [0, 31, None],
    "qk_nope_head_dim": [0, 15],
    "qk_rope_head_dim": [0, 7, 18],
    "v_head_dim": [0],
    "index_n_heads": [0],
    "index_head_dim": [6, 15],
    "index_topk": [0, 513, 10**9],
    "n_routed_experts": [0, 7, 10**9],
    "num_experts_per_tok": [0, 9, 5],
    "n_group": [0, 3, 8, 16],
    "topk_group": [0, 5],
    "n_shared_experts": [-1],
    "routed_scaling_factor": [math.nan, -1, "1"],
    "norm_topk_prob": [1, None],
    "rms_norm_eps": [math.nan, -1e-6, math.inf],
    "max_position_embeddings": [0, 10**12],
    "rope_theta": [math.nan, math.inf, 0, -1, "x"],
    "rope_scaling": ["yarn", {"type": "linear", "factor": 2}, {"factor": 2}],
    "bos_token_id": [512, -2],
    "scoring_func": ["softmax"],
    "topk_method": ["greedy", "group_limited_greedy"],
    "attention_bias": [True],
    "hidden_act": ["gelu"],
    "moe_layer_freq": [2, True],
    "index_topk_freq": [4],
    "indexer_types": [["full", "full", "full", "shared"], ["full"] * 3, [], "FFSF", 2],
    "index_topk_pattern": ["FSSS", ["F", "F", "F", "S"]],
    "attn_logit_softcapping": [30.0],
    "final_logit_softcapping": [50.0],
    "num_nextn_predict_layers": [-1, 10**9],
    "torch_dtype": ["int8"],
    "rope_interleave": ["yes"],
    "tie_word_embeddings": [0],
}
WRONG_VALUES = [(key, value) for key, values in WRONG.items() for value in values]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("indexer_types", ["full"] * 4),
        ("indexer_types", None),
        ("index_topk_pattern", "FFFF"),
        ("index_topk_pattern", ["F"] * 5),
        ("index_topk_freq", 1),
    ],
)
def test_an_indexer_in_every_layer_may_be_spelled_out(key, value):
    assert parse_config(dict(T_CPU) | {key: value}) == parse_config(T_CPU)


@pytest.mark.parametrize(("key", "value"), WRONG_VALUES)
def test_conf_14_one_line_names_key_and_value(key, value):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError) as error:
        parse_config(changed(**{key: value}))
    message = str(error.value)
    assert "\n" not in message
    assert key in message or key in {"qk_rope_head_dim", "rope_scaling"}
    # Kilobytes on Linux: nothing was sized by the value.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 0.5},
        {"factor": math.nan},
        {"original_max_position_embeddings": 0},
        {"beta_fast": "32"},
        {"mscale": math.inf},
        {"truncate": 1},
    ],
)
def test_conf_14_nested_keys_are_named_in_full(scaling):
    (key,) = scaling
    with pytest.raises(ConfigError, match=rf"rope_scaling\.{key}"):
        parse_config(changed(rope_scaling=YARN | scaling))
