"""Text: decoders, encoders, both together, mixtures of experts, state spaces."""

from __future__ import annotations

import torch

from zoo.huggingface import Settings, specimens
from zoo.specimen import Batch, tokens

VOCAB = 99
TEXT: Settings = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TEXT |= {"intermediate_size": 64, "max_position_embeddings": 64}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED: Settings = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
"""Queries in groups that share keys and values."""

_GPT: Settings = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_GPT |= {"bos_token_id": 1, "eos_token_id": 2}
_ROTARY_GPT: Settings = {**_GPT, "rotary_dim": 4}
_EMBEDDED: Settings = {**TEXT, "embedding_size": 32}
_T5: Settings = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
BART: Settings = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART |= {"decoder_start_token_id": 2, "forced_eos_token_id": 2}
_EXPERTS: Settings = {**GROUPED, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1}
_ROUTED: Settings = {**TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
_LATENT: Settings = {**_ROUTED, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_LATENT |= {"v_head_dim": 8}
_STATE: Settings = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}
_STATE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def causal(generator: torch.Generator) -> Batch:
    ids = tokens(generator, VOCAB)
    return {"input_ids": ids, "labels": ids}


def labelled(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator, VOCAB), "labels": tokens(generator, VOCAB)}


def classified(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator, VOCAB), "labels": torch.randint(0, 2, (2,), generator=generator)}


_DECODERS = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "openai-gpt"), _GPT),
    **dict.fromkeys(("gptj", "codegen"), _ROTARY_GPT),
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "falcon": TEXT,
    "mpt": {"vocab_size": VOCAB, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
    "opt": {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 16},
    "gpt_neo": {**TEXT, "num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "ctrl": {**_GPT, "dff": 64},
    **dict.fromkeys(
        (
            *("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "phi3", "olmo2"),
            *("starcoder2", "stablelm", "cohere", "glm", "granite", "smollm3", "nemotron", "exaone4", "apertus"),
            *("persimmon", "biogpt", "xglm", "gpt_neox", "bitnet", "diffllama", "helium", "seed_oss", "arcee"),
            "hunyuan_v1_dense",
        ),
        GROUPED,
    ),
}

_ENCODERS = {
    **dict.fromkeys(
        (
            *("bert", "roberta", "camembert", "electra", "mobilebert", "deberta", "deberta-v2", "modernbert"),
            *("roformer", "mpnet", "megatron-bert", "convbert", "rembert", "squeezebert", "nystromformer"),
            *("layoutlm", "esm", "eurobert", "ibert", "xlm-roberta-xl", "yoso", "fnet"),
        ),
        _EMBEDDED,
    ),
    "albert": {**TEXT, "embedding_size": 16, "num_hidden_groups": 1},
    "funnel": {**_GPT, "d_model": 32, "block_sizes": [1, 1, 1], "d_head": 8, "d_inner": 64},
    "longformer": {**TEXT, "attention_window": 4},
    "big_bird": {**TEXT, "attention_type": "original_full"},
    "reformer": {**TEXT, "attention_head_size": 8, "feed_forward_size": 64, "attn_layers": ["local", "local"]}
    | {"local_attn_chunk_length": 4, "axial_pos_embds": False, "is_decoder": False}
    | {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0},  # its dropout seeds itself
    "perceiver": {**TEXT, "d_model": 32, "d_latents": 32, "num_latents": 8, "max_position_embeddings": 12}
    | {"num_self_attends_per_block": 2, "num_blocks": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
}

_CLASSIFIERS = {
    "distilbert": {"vocab_size": VOCAB, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    "canine": {**TEXT, "downsampling_rate": 2, "local_transformer_stride": 8, "num_hash_buckets": 64}
    | {"upsampling_kernel_size": 2},
}

_ENCODER_DECODERS = {
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "blenderbot", "plbart", "m2m_100"), BART),
    "led": {**BART, "attention_window": 4},
    "bigbird_pegasus": {**BART, "attention_type": "original_full"},
    "prophetnet": {"vocab_size": VOCAB, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2}
    | {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    | {"max_position_embeddings": 64},
}

_MIXTURES = {
    **dict.fromkeys(
        (
            *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "phimoe", "jetmoe"),
            *("ernie4_5_moe", "flex_olmo", "minimax", "hunyuan_v1_moe"),
        ),
        _EXPERTS,
    ),
    "qwen3_next": {**_EXPERTS, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    "glm4_moe": {**_ROUTED, "num_key_value_heads": 2, "head_dim": 8, "n_group": 1},
}

_SEQUENCE_MIXTURES = {
    "switch_transformers": _T5,
    "nllb-moe": {**BART, "num_experts": 4, "expert_capacity": 16, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
}

_STATE_SPACES = {
    "mamba": _STATE,
    "falcon_mamba": _STATE,
    "mamba2": {**_STATE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "rwkv": {**_STATE, "attention_hidden_size": 32, "intermediate_size": 64, "context_length": 64},
    "jamba": {**GROUPED, "num_hidden_layers": 4, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2}
    | {"attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False}
    | {"mamba_d_state": 8, "mamba_dt_rank": 4},
    "recurrent_gemma": {**GROUPED, "lru_width": 32, "block_types": ("recurrent", "attention"), "num_key_value_heads": 1}
    | {"attention_window_size": 8},
    "bamba": {**GROUPED, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    | {"mamba_chunk_size": 4, "attn_layer_indices": [1]},
    "zamba2": {**GROUPED, "num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8}
    | {"mamba_ngroups": 1, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "chunk_size": 4}
    | {"num_mem_blocks": 1, "use_mamba_kernels": False},
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention", "conv"]},
}

SPECIMENS = [
    *specimens("decoder", "AutoModelForCausalLM", causal, _DECODERS),
    *specimens("encoder", "AutoModelForMaskedLM", labelled, _ENCODERS),
    *specimens("encoder", "AutoModelForCausalLM", labelled, {"xlnet": {**_GPT, "d_model": 32, "d_inner": 64}}),
    *specimens("encoder", "AutoModelForSequenceClassification", classified, _CLASSIFIERS),
    *specimens("encoder-decoder", "AutoModelForSeq2SeqLM", labelled, _ENCODER_DECODERS),
    *specimens("experts", "AutoModelForCausalLM", causal, _MIXTURES),
    *specimens("experts", "AutoModelForSeq2SeqLM", labelled, _SEQUENCE_MIXTURES),
    *specimens("state space", "AutoModelForCausalLM", causal, _STATE_SPACES),
]
