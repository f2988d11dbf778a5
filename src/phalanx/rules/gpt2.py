"""Names of the dimensions of GPT-2. Its projections are Conv1D: weights are (in, out). c_attn is q, k and v in one."""

NAMES = {
    "*wte.weight": "vocab embed",
    "*wte:out": "batch residual_seq embed",
    "*wpe.weight": "positions embed",
    "*.ln_*.weight": "embed",
    "*.ln_*.bias": "embed",
    "*.attn.c_attn.weight": "embed heads",
    "*.attn.c_attn.bias": "heads",
    "*.attn.c_proj.weight": "heads embed",
    "*.attn.c_proj.bias": "embed",
    "*.attn.c_proj:out": "batch residual_seq embed",
    "*.mlp.c_fc.weight": "embed mlp",
    "*.mlp.c_fc.bias": "mlp",
    "*.mlp.c_proj.weight": "mlp embed",
    "*.mlp.c_proj.bias": "embed",
    "*.mlp.c_proj:out": "batch residual_seq embed",
    "lm_head.weight": "vocab embed",
}
INPUTS = {
    "input_ids": "batch seq",
    "position_ids": "batch seq",
    "attention_mask": "batch seq",
    "labels": "batch seq",
    "targets": "batch seq",
}
