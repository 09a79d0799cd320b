"""Images, sound, series, and several of them at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.huggingface import Settings, mean_square, specimens
from zoo.specimen import Batch, tokens
from zoo.text import BART, GROUPED, TEXT, VOCAB, causal

_IMAGE: Settings = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
_IMAGE |= {"image_size": 32, "patch_size": 8}
_STAGES: Settings = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}
_ATTENTIVE_STAGES: Settings = {**_STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16}
_ATTENTIVE_STAGES |= {"image_size": 64}
_WINDOWS: Settings = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1, 1], "num_heads": [2, 2, 2]}
_WINDOWS |= {"window_size": 4}
_SPEECH: Settings = {**TEXT, "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3)}
_SPEECH |= {"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
_SPEECH |= {"mask_time_length": 2, "mask_feature_length": 2}
_HEARD: Settings = {**BART, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
_READ: Settings = {**BART, "input_feat_per_channel": 16, "max_source_positions": 64, "max_target_positions": 32}
_READ |= {"conv_channels": 16, "num_conv_layers": 2, "conv_kernel_sizes": (5, 5)}
_SPOKEN: Settings = {**TEXT, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2}
_SPOKEN |= {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
_TWO_TOWERS: Settings = {"projection_dim": 32}
_TWO_TOWERS |= {"text_config": {**TEXT, "projection_dim": 32}, "vision_config": {**_IMAGE, "projection_dim": 32}}
_IMAGE_TOKEN = VOCAB - 1
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_PATCHES: Settings = {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4}
_PATCHES |= {"prediction_length": 8, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}


def _classes(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (2,), generator=generator)


def _pixels(generator: torch.Generator, size: int = 32) -> Batch:
    return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}


def _images(generator: torch.Generator, size: int = 32) -> Batch:
    return {**_pixels(generator, size), "labels": _classes(generator)}


def _video(generator: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(2, 4, 3, 32, 32, generator=generator), "labels": _classes(generator)}


def _points(generator: torch.Generator) -> Batch:
    return {**_pixels(generator), "input_points": torch.rand(2, 1, 1, 2, generator=generator) * 32}


def _waves(generator: torch.Generator, length: int = 800) -> Batch:
    return {"input_values": torch.randn(2, length, generator=generator), "labels": tokens(generator, VOCAB, length=4)}


def _spectrogram(generator: torch.Generator) -> Batch:
    return {"input_values": torch.randn(2, 24, 16, generator=generator), "labels": _classes(generator)}


def _features(generator: torch.Generator, shape: tuple[int, int]) -> Batch:
    return {"input_features": torch.randn(2, *shape, generator=generator), "labels": tokens(generator, VOCAB)}


def _captioned(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator, VOCAB), **_pixels(generator)}


def _contrasted(generator: torch.Generator) -> Batch:
    return {**_captioned(generator), "return_loss": True}


def _image_in_text(generator: torch.Generator, count: int = 16) -> Batch:
    ids = tokens(generator, VOCAB - 4, length=count + 8)
    ids[:, 2 : 2 + count] = _IMAGE_TOKEN
    return {"input_ids": ids, "labels": ids, **_pixels(generator)}


def _tiled_image_in_text(generator: torch.Generator) -> Batch:
    return {**_image_in_text(generator, 4), "pixel_values": torch.randn(2, 1, 3, 32, 32, generator=generator)}


def _patches_in_text(generator: torch.Generator) -> Batch:
    batch = _image_in_text(generator, 4)
    batch["mm_token_type_ids"] = (batch["input_ids"] == _IMAGE_TOKEN).int()
    return batch | {
        "pixel_values": torch.randn(32, 192, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
    }


def _image_beside_text(generator: torch.Generator) -> Batch:
    ones = partial(torch.ones, dtype=torch.long)
    return {
        **causal(generator),
        "pixel_values": torch.randn(2, 1, 1, 3, 16, 16, generator=generator),
        "aspect_ratio_ids": ones(2, 1),
        "aspect_ratio_mask": ones(2, 1, 1),
        "cross_attention_mask": ones(2, 12, 1, 1),
    }


def _series(generator: torch.Generator) -> Batch:
    return {
        "past_values": torch.randn(2, 32, 2, generator=generator),
        "future_values": torch.randn(2, 8, 2, generator=generator),
    }


def _multimodal_loss(output: Any) -> Tensor:
    return output.multimodal_output.last_hidden_state.square().mean()


_CLASSIFIERS = {
    **dict.fromkeys(
        ("vit", "beit", "dinov2", "dinov2_with_registers", "vit_msn", "data2vec-vision", "ijepa"),
        _IMAGE,
    ),
    **dict.fromkeys(("swin", "swinv2"), _WINDOWS),
}
_STAGED_CLASSIFIERS = {
    **dict.fromkeys(("convnext", "convnextv2", "poolformer"), _STAGES),
    "resnet": {**_STAGES, "embedding_size": 8},
    "regnet": {**_STAGES, "embedding_size": 8, "groups_width": 4},
    **dict.fromkeys(("segformer", "pvt"), _ATTENTIVE_STAGES),
    "mobilenet_v2": {"depth_multiplier": 0.25, "image_size": 64},
    "mobilevit": {"image_size": 64, "hidden_sizes": [16, 16, 16], "num_attention_heads": 2}
    | {"neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 16]},
}
_MASKED_IMAGE = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2}
_SEGMENTER = {
    "vision_config": {**_IMAGE, "output_channels": 16, "mlp_dim": 64, "window_size": 2, "global_attn_indexes": [1]}
    | {"num_pos_feats": 8},
    "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
    "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"iou_head_hidden_dim": 16},
}
_LISTENERS = {
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "unispeech", "data2vec-audio"), _SPEECH),
    "sew": {**_SPEECH, "squeeze_factor": 2},
}
_LOOKING_READERS = {
    "llava": {"text_config": {"model_type": "llama", **GROUPED}, "vision_feature_layer": -1}
    | {"vision_config": {"model_type": "clip_vision_model", **_IMAGE}, "image_token_index": _IMAGE_TOKEN},
    "paligemma": {"text_config": {"model_type": "gemma", **GROUPED}, "projection_dim": 32, "hidden_size": 32}
    | {"vision_config": {"model_type": "siglip_vision_model", **_IMAGE, "projection_dim": 32}}
    | {"image_token_index": _IMAGE_TOKEN},
}
_MLLAMA = {
    "text_config": {**TEXT, "num_key_value_heads": 2, "cross_attention_layers": [1], "rope_parameters": _ROTARY},
    "vision_config": {**_IMAGE, "image_size": 16, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4}
    | {"max_num_tiles": 1, "intermediate_layers_indices": [0], "vision_output_dim": 64}
    | {"supported_aspect_ratios": [[1, 1]]},
    "image_token_index": _IMAGE_TOKEN,
}
_QWEN2_VL = {
    "text_config": {**GROUPED, "rope_parameters": {**_ROTARY, "mrope_section": [1, 1, 2]}},
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2}
    | {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 1},
    **{"image_token_id": _IMAGE_TOKEN, "vision_start_token_id": 97, "vision_end_token_id": 96, "video_token_id": 95},
}
_IDEFICS = {"text_config": {"model_type": "llama", **GROUPED}, "vision_config": _IMAGE, "scale_factor": 2}
_FLAVA = {"text_config": TEXT, "image_config": _IMAGE, "multimodal_config": _IMAGE, "hidden_size": 32}
_BLIP = {"text_config": {**TEXT, "encoder_hidden_size": 32}, "vision_config": _IMAGE, "projection_dim": 32}

_SEE, _HEAR, _BOTH, _SERIES = "vision", "audio", "multimodal", "series"
SPECIMENS = [
    *specimens(_SEE, "AutoModelForImageClassification", _images, _CLASSIFIERS),
    *specimens(_SEE, "AutoModelForImageClassification", partial(_images, size=64), _STAGED_CLASSIFIERS),
    *specimens(_SEE, "AutoModel", _pixels, {"deit": _IMAGE, "siglip_vision_model": _IMAGE}, mean_square),
    *specimens(_SEE, "AutoModelForPreTraining", _pixels, {"vit_mae": {**_IMAGE, **_MASKED_IMAGE}}),
    *specimens(_SEE, "AutoModelForVideoClassification", _video, {"videomae": {**_IMAGE, "num_frames": 4}}),
    *specimens(_SEE, "AutoModelForMaskGeneration", _points, {"sam": _SEGMENTER}, mean_square),
    *specimens(
        *(_SEE, "AutoModelForObjectDetection", _pixels),
        {"yolos": {**_IMAGE, "image_size": [32, 32], "num_detection_tokens": 5}},
        mean_square,
    ),
    *specimens(_HEAR, "AutoModelForCTC", _waves, _LISTENERS),
    *specimens(
        *(_HEAR, "AutoModelForAudioClassification", _spectrogram),
        {"audio-spectrogram-transformer": {**_IMAGE, "max_length": 24, "num_mel_bins": 16}},
    ),
    *specimens(_HEAR, "AutoModelForSpeechSeq2Seq", partial(_features, shape=(16, 40)), {"whisper": _HEARD}),
    *specimens(_HEAR, "AutoModelForSpeechSeq2Seq", partial(_features, shape=(40, 16)), {"speech_to_text": _READ}),
    *specimens(_HEAR, "AutoModelForSpeechSeq2Seq", partial(_waves, length=4000), {"moonshine": _SPOKEN}),
    *specimens(
        *(_BOTH, "AutoModel", _contrasted),
        {**dict.fromkeys(("clip", "siglip", "chinese_clip", "metaclip_2", "clipseg"), _TWO_TOWERS), "blip": _BLIP},
    ),
    *specimens(_BOTH, "AutoModel", _captioned, {"flava": _FLAVA}, _multimodal_loss),
    *specimens(_BOTH, "AutoModelForImageTextToText", _image_in_text, _LOOKING_READERS),
    *specimens(
        _BOTH,
        "AutoModelForImageTextToText",
        _tiled_image_in_text,
        {"idefics3": _IDEFICS | {"image_token_id": _IMAGE_TOKEN}},
    ),
    *specimens(_BOTH, "AutoModelForImageTextToText", _patches_in_text, {"qwen2_vl": _QWEN2_VL}),
    *specimens(_BOTH, "AutoModelForImageTextToText", _image_beside_text, {"mllama": _MLLAMA}),
    *specimens(
        *(_BOTH, "AutoModelForCausalLM", lambda generator: causal(generator) | _pixels(generator)),
        {"git": {**TEXT, "vision_config": _IMAGE}},
    ),
    *specimens(_SERIES, "PatchTSTForPrediction", _series, {"patchtst": _PATCHES}),
    *specimens(_SERIES, "PatchTSMixerForPrediction", _series, {"patchtsmixer": _PATCHES}),
]
