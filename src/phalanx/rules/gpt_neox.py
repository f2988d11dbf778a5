"""Names of the dimensions of GPT-NeoX. query_key_value holds q, k and v head by head, so that its shards are whole heads of all three."""

NAMES = {
    "*embed_in.weight": "vocab embed",
    "*embed_in:out": "batch residual_seq embed",
    "*.query_key_value.weight": "heads embed",
    "*.query_key_value.bias": "heads",
    "*.dense.weight": "embed heads",
    "*.dense.bias": "embed",
    "*.dense:out": "batch residual_seq embed",
    "*.dense_h_to_4h.weight": "mlp embed",
    "*.dense_h_to_4h.bias": "mlp",
    "*.dense_4h_to_h.weight": "embed mlp",
    "*.dense_4h_to_h.bias": "embed",
    "*.dense_4h_to_h:out": "batch residual_seq embed",
    "*layernorm.weight": "embed",
    "*layernorm.bias": "embed",
    "*layer_norm.weight": "embed",
    "*layer_norm.bias": "embed",
    "lm_head.weight": "vocab embed",
}
INPUTS = {
    "input_ids": "batch seq",
    "position_ids": "batch seq",
    "attention_mask": "batch seq",
    "labels": "batch seq",
    "targets": "batch seq",
}
