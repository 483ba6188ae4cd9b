# SPDX-License-Identifier: Apache-2.0
"""Names of RT-DETR's, RT-DETRv2's and D-FINE's weights: the authors' code and transformers -> ours."""

NOT_WEIGHTS = r"\.(num|n)_points_scale$|^transformer\.decoder\.(anchors|valid_mask)$"
"""Constants that the files store with the weights; our modules compute them where they are needed."""

_QUERIES = (
    (r"^(model|decoder)\.denoising_class_embed\.", "queries.denoising.label_enc."),
    (r"^(model|decoder)\.enc_output\.(0|proj)\.", "queries.enc_output."),
    (r"^(model|decoder)\.enc_output\.(1|norm)\.", "queries.enc_output_norm."),
    (r"^(model|decoder)\.enc_score_head\.", "queries.class_embed."),
    (r"^(model|decoder)\.enc_bbox_head\.", "queries.bbox_embed."),
    (r"^(model\.)?decoder\.query_pos_head\.", "queries.ref_point_head."),
)
# The authors' names; D-FINE's backbone already has timm's.
AUTHORS = (
    *_QUERIES,
    *((rf"^backbone\.conv1\.conv1_{n + 1}\.conv\.", f"backbone.body.conv1.{3 * n}.") for n in range(3)),
    *((rf"^backbone\.conv1\.conv1_{n + 1}\.norm\.", f"backbone.body.conv1.{3 * n + 1}.") for n in range(2)),
    (r"^backbone\.conv1\.conv1_3\.norm\.", "backbone.body.bn1."),
    *((rf"^backbone\.res_layers\.{n}\.blocks\.", f"backbone.body.layer{n + 1}.") for n in range(4)),
    *((rf"\.branch2{letter}\.conv\.", f".conv{n + 1}.") for n, letter in enumerate("abc")),
    *((rf"\.branch2{letter}\.norm\.", f".bn{n + 1}.") for n, letter in enumerate("abc")),
    (r"\.short\.conv\.conv\.", ".downsample.0.1."),
    (r"\.short\.(conv\.)?norm\.", ".downsample.1."),
    (r"\.short\.conv\.", ".downsample.0."),
    (r"^backbone\.(stem|stages)\.", r"backbone.body.\1."),
    (r"^encoder\.input_proj\.", "input_proj."),
    (r"^decoder\.input_proj\.", "transformer.encoder.output_proj."),
    (r"^encoder\.encoder\.0\.", "transformer.encoder.encoder."),
    (r"^decoder\.dec_score_head\.", "class_embed."),
    (r"^decoder\.dec_bbox_head\.", "bbox_embed."),
    (r"^encoder\.", "transformer.encoder."),
    (r"^decoder\.(decoder\.)?", "transformer.decoder."),
    (r"(\.downsample_convs\.\d+)\.0\.cv", r"\1.cv"),
    # Self-attention has the first norm there and the second here.
    (r"^(transformer\.decoder\.layers\.\d+\.)norm1\.", r"\1own_norm."),
    (r"^(transformer\.decoder\.layers\.\d+\.)norm2\.", r"\1norm1."),
    (r"\.own_norm\.", ".norm2."),
)
# ResNets of transformers
HF_RESNET = (
    (r"\.body\.embedder\.embedder\.convolution\.", ".body.conv1."),
    (r"\.body\.embedder\.embedder\.normalization\.", ".body.bn1."),
    *((rf"\.body\.encoder\.stages\.{n}\.layers\.", f".body.layer{n + 1}.") for n in range(4)),
    *((rf"\.layer\.{n}\.convolution\.", f".conv{n + 1}.") for n in range(3)),
    *((rf"\.layer\.{n}\.normalization\.", f".bn{n + 1}.") for n in range(3)),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.(1\.)?normalization\.", ".downsample.1."),
)
TRANSFORMERS = (
    *_QUERIES,
    (r"^model\.backbone\.model\.", "backbone.body."),
    (r"\.body\.embedder\.embedder\.2\.normalization\.", ".body.bn1."),
    *((rf"\.body\.embedder\.embedder\.{n}\.convolution\.", f".body.conv1.{3 * n}.") for n in range(3)),
    *((rf"\.body\.embedder\.embedder\.{n}\.normalization\.", f".body.conv1.{3 * n + 1}.") for n in range(2)),
    (r"\.shortcut\.1\.convolution\.", ".downsample.0.1."),
    *HF_RESNET,
    # HGNetv2
    (r"^backbone\.body\.embedder\.", "backbone.body.stem."),
    (r"^backbone\.body\.encoder\.", "backbone.body."),
    (r"^(backbone\.body\..*)\.convolution\.", r"\1.conv."),
    (r"^(backbone\.body\..*)\.normalization\.", r"\1.bn."),
    *((rf"^model\.encoder_input_proj\.(\d+)\.{n}\.", rf"input_proj.\1.{name}.") for n, name in enumerate(("conv", "norm"))),
    *(
        (rf"^model\.decoder_input_proj\.(\d+)\.{n}\.", rf"transformer.encoder.output_proj.\1.{name}.")
        for n, name in enumerate(("conv", "norm"))
    ),
    (r"^model\.encoder\.(aifi|encoder)\.0\.", "transformer.encoder.encoder."),
    (r"^model\.decoder\.(class|bbox)_embed\.", r"\1_embed."),
    (r"^model\.(encoder|decoder)\.", r"transformer.\1."),
    (r"^(transformer\.encoder\.encoder\..*)\.self_attn_layer_norm\.", r"\1.norm1."),
    (r"^(transformer\.encoder\.encoder\..*)\.final_layer_norm\.", r"\1.norm2."),
    (r"^(transformer\.decoder\..*)\.self_attn_layer_norm\.", r"\1.norm2."),
    (r"^(transformer\.decoder\..*)\.final_layer_norm\.", r"\1.norm3."),
    (r"\.encoder_attn_layer_norm\.", ".norm1."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.(mlp\.)?fc([12])\.", r".linear\2."),
    (r"\.mlp\.layers\.0\.", ".linear1."),
    (r"\.mlp\.layers\.1\.", ".linear2."),
)
TRANSFORMERS_DFINE = (
    *TRANSFORMERS,
    (r"(_blocks\.\d+)\.conv([14])\.", r"\1.cv\2."),
    (r"(_blocks\.\d+)\.csp_rep1\.", r"\1.cv2.0."),
    (r"(_blocks\.\d+)\.conv2\.", r"\1.cv2.1."),
    (r"(_blocks\.\d+)\.csp_rep2\.", r"\1.cv3.0."),
    (r"(_blocks\.\d+)\.conv3\.", r"\1.cv3.1."),
    (r"(downsample_convs\.\d+)\.conv([12])\.", r"\1.cv\2."),
)
