"""Names of the dimensions of Phi-3: Llama's, with q, k and v in one projection and gate and up in another."""

from phalanx.rules import llama

FUSED = {
    "*.qkv_proj.weight": "heads embed",
    "*.gate_up_proj.weight": "mlp embed",
}
NAMES = FUSED | llama.NAMES
INPUTS = llama.INPUTS
